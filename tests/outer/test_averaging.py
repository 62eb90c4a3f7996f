"""Buckets and the weighted mean."""

import pytest
import torch

from dsx.errors import ExchangeError
from dsx.outer.buckets import buckets, pack, unpack
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import LOSSLESS, make_clusters, run, together

SHAPES = {"a": torch.Size([3, 2]), "scalar": torch.Size([]), "b": torch.Size([7])}


def test_packed_tensors_come_back_bit_for_bit() -> None:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["a"] = torch.randn(2, 3).T
    names = list(SHAPES)
    back = unpack(pack(tensors, names), SHAPES, names, "x")
    assert all(torch.equal(back[name], tensors[name]) for name in names)


def test_a_payload_of_another_length_is_refused_by_the_senders_name() -> None:
    with pytest.raises(ExchangeError, match="cluster far sent 12 bytes"):
        unpack(torch.zeros(12, dtype=torch.uint8), SHAPES, ["a"], "far")


def test_buckets_hold_every_name_once_and_stay_below_their_limit() -> None:
    million = torch.Size([1024, 1024])
    shapes = {f"w{index}": million for index in range(40)} | {"huge": torch.Size([32, 2**20])}
    cut = list(buckets(shapes))
    assert [name for bucket in cut for name in bucket] == list(shapes)
    assert [len(bucket) for bucket in cut] == [16, 16, 8, 1]


CODECS: list[object] = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2",
    "sign",
    {"type": "topk", "fraction": 0.1},
    {"type": "lowrank", "rank": 2},
]


@pytest.mark.parametrize("averaging", ["gather", "scatter"])
@pytest.mark.parametrize("delay", [0, 1, "round"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_shared_state_is_the_same_on_all_clusters_after_ten_rounds(
    codec: object, delay: int | str, averaging: str
) -> None:
    compression = {"matrices": codec, "embeddings": codec, "averaging": averaging}
    settings = OuterSettings(local_steps=2, delay=delay, compression=compression)
    clusters = make_clusters(settings, 3)
    run(clusters, 20)
    digests = [[report.shared_digest for report in cluster.reports] for cluster in clusters]
    assert len(set(digests[0])) == 10
    assert digests[1] == digests[0]
    assert digests[2] == digests[0]
    first, *others = [cluster.engine.state.tensors() for cluster in clusters]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_gather_and_scatter_of_a_lossless_codec_are_the_same_bits() -> None:
    thetas = []
    for averaging in ("gather", "scatter"):
        compression = LOSSLESS | {"averaging": averaging}
        clusters = make_clusters(OuterSettings(local_steps=3, compression=compression), 4)
        run(clusters, 9)
        thetas.append(clusters[0].engine.state.tensors())
    assert all(torch.equal(thetas[0][name], thetas[1][name]) for name in thetas[0])


def test_full_rank_averages_as_no_codec_does() -> None:
    lowrank = {"type": "lowrank", "rank": 8, "factors": "none"}
    thetas = []
    for codec in ("none", lowrank):
        compression = LOSSLESS | {"matrices": codec}
        clusters = make_clusters(OuterSettings(local_steps=3, compression=compression), 2)
        run(clusters, 9)
        thetas.append(clusters[0].engine.theta)
    for name, value in thetas[0].items():
        torch.testing.assert_close(thetas[1][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("averaging", ["gather", "scatter"])
def test_what_encodings_leave_out_arrives_later(averaging: str) -> None:
    """With averaging, everything ever sent plus what is still kept back is everything made."""
    compression = {"matrices": "sign", "embeddings": "sign", "averaging": averaging}
    settings = OuterSettings(local_steps=1, delay=0, lr=1.0, momentum=0.0, compression=compression)
    clusters = make_clusters(settings, 2, optimizer=torch.optim.SGD, lr=0.01)
    made = {name: torch.zeros_like(value) for name, value in clusters[0].weights().items()}
    before = clusters[0].weights()
    together(clusters, lambda cluster: cluster.engine.start())
    for _ in range(12):
        for cluster in clusters:
            start = cluster.weights()
            cluster.train()
            for name, value in cluster.weights().items():
                made[name] += (start[name] - value) / 2
            cluster.engine.advance(tokens=4, seconds=0.01)
        together(clusters, lambda cluster: cluster.engine.settle())
    for name, theta in clusters[0].engine.theta.items():
        kept_back = sum(
            cluster.engine.averager.state_dict().get(f"feedback/{name}", torch.zeros(()))
            for cluster in clusters
        )
        torch.testing.assert_close(before[name] - theta + kept_back / 2, made[name])


def test_bytes_on_the_wire_follow_the_codec() -> None:
    sent = {}
    for codec in ("none", "int4"):
        compression = LOSSLESS | {"matrices": codec}
        clusters = make_clusters(
            OuterSettings(local_steps=1, compression=compression), 2, width=512
        )
        run(clusters, 1)
        sent[codec] = clusters[0].reports[-1].bytes_sent
    parameters = sum(value.numel() for value in clusters[0].weights().values())
    assert sent["none"] == pytest.approx(4 * parameters, rel=0.2)
    assert sent["int4"] < 0.5 * sent["none"]


def test_a_pseudo_gradient_that_is_not_finite_is_left_out_and_harms_nobody() -> None:
    settings = OuterSettings(local_steps=1, delay=0)
    clusters = make_clusters(settings, 2)
    run(clusters, 3, finish=False)
    residuals = clusters[1].engine.averager.state_dict()
    kept = {name: value.clone() for name, value in residuals.items()}
    with torch.no_grad():
        next(clusters[1].model.parameters()).fill_(float("nan"))
    for cluster in clusters:
        cluster.engine.advance(tokens=4, seconds=0.01)
    together(clusters, lambda cluster: cluster.keep(cluster.engine.settle()))
    assert clusters[0].reports[-1].participants == ("c0",)
    assert clusters[1].engine.rounds_left_out == 1
    assert clusters[1].reports[-1].shared_digest == clusters[0].reports[-1].shared_digest
    for name, value in clusters[1].weights().items():
        theta = clusters[0].engine.theta[name]
        assert torch.equal(value, clusters[1].engine.averager.without_residual(name, theta))
    for name, value in clusters[1].engine.averager.state_dict().items():
        assert torch.equal(value, kept[name])
