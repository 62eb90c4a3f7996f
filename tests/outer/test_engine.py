"""The equivalences E1, E2, E4 and the invariants I1, I2 of the outer engine."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsx.errors import ExchangeRefused
from dsx.exchange.in_process import InProcessHub
from dsx.outer import round as round_
from dsx.outer.engine import OuterEngine
from dsx.outer.weights import ModuleWeights
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import LOSSLESS, Cluster, make_clusters, run, together

AVERAGING = {"lr": 1.0, "momentum": 0.0, "compression": LOSSLESS}
MODES = list(itertools.product([0, 2, 5, "round", "auto"], ["none", "all", "mean"]))


def undisturbed(steps: int) -> dict[str, torch.Tensor]:
    (cluster,) = make_clusters(OuterSettings(), 1)
    for _ in range(steps):
        cluster.train()
    return cluster.weights()


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("local_steps", [1, 3, 7])
def test_one_averaging_cluster_trains_as_if_alone(local_steps: int) -> None:
    (cluster,) = make_clusters(OuterSettings(local_steps=local_steps, delay=0, **AVERAGING), 1)
    run([cluster], 21)
    assert_close(cluster.weights(), undisturbed(21), 1e-6)


def test_two_clusters_with_sgd_and_one_step_rounds_equal_one_run_on_the_joined_batch() -> None:
    settings = OuterSettings(local_steps=1, delay=0, **AVERAGING)
    pair = make_clusters(settings, 2, optimizer=torch.optim.SGD, lr=0.05)
    (joined,) = make_clusters(settings, 1, optimizer=torch.optim.SGD, lr=0.05)
    for step in range(15):
        for cluster in pair:
            cluster.step = step
        halves = [cluster.batch() for cluster in pair]
        joined.train((torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])))
    for cluster in pair:
        cluster.step = 0
    run(pair, 15)
    assert_close(pair[0].weights(), joined.weights(), 1e-6)
    assert_close(pair[1].weights(), joined.weights(), 1e-6)


@pytest.mark.parametrize("delay", [0, 1, 2, 5, "round", "auto"])
@pytest.mark.parametrize("own_share", ["all", "mean"])
def test_one_averaging_cluster_that_keeps_its_progress_is_undisturbed_by_any_delay(
    delay: int | str, own_share: str
) -> None:
    settings = OuterSettings(local_steps=5, delay=delay, own_share=own_share, **AVERAGING)
    (cluster,) = make_clusters(settings, 1)
    run([cluster], 23)
    assert_close(cluster.weights(), undisturbed(23), 2e-6)
    assert_close(cluster.engine.theta, undisturbed(23), 2e-6)


@pytest.mark.parametrize("delay", [0, 2, "round"])
@pytest.mark.parametrize("codec", ["sign", "int2", {"type": "topk", "fraction": 0.1}])
def test_equal_clusters_that_keep_what_their_codec_leaves_out_are_undisturbed_by_it(
    delay: int | str, codec: object
) -> None:
    """Averaging: theta' - e' = theta - e - delta, so nothing is ever taken back from a cluster."""
    compression = {"matrices": codec, "embeddings": codec, "vectors": "sign"}
    block = {"local_steps": 5, "delay": delay, "lr": 1.0, "momentum": 0.0}
    losses = {}
    for kept in ("all", "none"):
        settings = OuterSettings.model_validate(
            {**block, "own_residual": kept, "compression": compression}
        )
        clusters = make_clusters(settings, 2)
        clusters[1].index = 0
        run(clusters, 23)
        losses[kept] = max(
            float((value - undisturbed(23)[name]).abs().max())
            for name, value in clusters[0].weights().items()
        )
        for name, value in clusters[0].engine.theta.items():
            assert torch.equal(clusters[1].engine.theta[name], value)
    assert losses["all"] < 2e-6
    assert losses["none"] > 1e-3, "what was left out was taken back"


@pytest.mark.parametrize("warmup_steps", [0, 12])
@pytest.mark.parametrize("delay", [2, "round"])
def test_one_cluster_that_keeps_nothing_follows_the_papers_recursion(
    delay: int | str, warmup_steps: int
) -> None:
    steps, rounds, lr, momentum = 5, 4, 0.5, 0.3
    settings = OuterSettings(
        local_steps=steps,
        delay=delay,
        own_share="none",
        lr=lr,
        momentum=momentum,
        momentum_warmup_steps=warmup_steps,
    )
    (cluster,) = make_clusters(settings, 1)
    run([cluster], steps * rounds)

    (plain,) = make_clusters(OuterSettings(), 1)
    names = list(plain.weights())
    theta = plain.weights()
    m = {name: torch.zeros_like(value) for name, value in theta.items()}
    arrival = steps if delay == "round" else delay
    flight = None
    # Before the four rounds the run had made 0, 5, 10 and 15 inner steps.
    momenta = iter([0, momentum * 5 / 12, momentum * 10 / 12, momentum])

    def put(values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in plain.model.named_parameters():
                parameter.copy_(values[name])

    def outer_step(delta: dict[str, torch.Tensor]) -> None:
        mu = next(momenta) if warmup_steps else momentum
        for name in names:
            m[name] = mu * m[name] + delta[name]
            theta[name] = theta[name] - lr * (delta[name] + mu * m[name])

    for _ in range(rounds):
        for step in range(1, steps + 1):
            plain.train()
            if flight is not None and step == arrival:
                delta, start = flight
                moved = {n: start[n] - v for n, v in plain.weights().items()}
                outer_step(delta)
                put({n: theta[n] - moved[n] for n in names})
                flight = None
        delta = {n: theta[n] - v for n, v in plain.weights().items()}
        flight = (delta, {n: v.clone() for n, v in theta.items()})
        put(theta)
    outer_step(flight[0])
    assert_close(cluster.engine.theta, theta, 1e-6)


@pytest.mark.parametrize("own_residual", ["none", "all"])
@pytest.mark.parametrize(("delay", "own_share"), MODES)
def test_all_clusters_hold_the_same_shared_bits_after_every_round(
    delay: int | str, own_share: str, own_residual: str
) -> None:
    settings = OuterSettings(
        local_steps=5, delay=delay, own_share=own_share, own_residual=own_residual
    )
    clusters = make_clusters(settings, 3)
    run(clusters, 23)
    digests = [[report.shared_digest for report in cluster.reports] for cluster in clusters]
    assert len(digests[0]) == 5
    assert len(set(digests[0])) == 5
    assert digests[1] == digests[0]
    assert digests[2] == digests[0]
    for name, value in clusters[0].engine.theta.items():
        assert torch.equal(clusters[1].engine.theta[name], value)
        assert own_residual == "all" or torch.equal(clusters[1].weights()[name], value)
    first, *others = [cluster.engine.state.tensors() for cluster in clusters]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("delay", "own_share"), MODES)
def test_every_inner_step_is_reported_exactly_once(delay: int | str, own_share: str) -> None:
    """With inner SGD on constant gradients every step moves by a known amount."""

    class Constant(Cluster):
        def train(self, batch: object = None) -> None:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(2.0**-10)
            self.step += 1

    settings = OuterSettings(local_steps=5, delay=delay, own_share=own_share, **AVERAGING)
    hub = InProcessHub(["a", "b"], timeout_seconds=30)
    clusters = [Constant(settings, hub.exchange(name)) for name in ("a", "b")]
    before = clusters[0].weights()
    run(clusters, 23)
    for name, value in clusters[0].engine.theta.items():
        torch.testing.assert_close(
            before[name] - value, torch.full_like(value, 23 * 2.0**-10), rtol=0, atol=1e-6
        )
    assert clusters[0].reports[-1].tokens_total == 2 * 23 * 4


def test_a_cluster_is_weighted_by_the_tokens_it_trained() -> None:
    settings = OuterSettings(local_steps=1, delay=0, **AVERAGING)
    hub = InProcessHub(["a", "b"], timeout_seconds=30)
    clusters = [Cluster(settings, hub.exchange(name)) for name in ("a", "b")]
    together(clusters, lambda cluster: cluster.engine.start())
    before = clusters[0].weights()
    for cluster, shift, tokens in zip(clusters, (1.0, 0.0), (30, 10), strict=True):
        with torch.no_grad():
            for parameter in cluster.model.parameters():
                parameter.add_(shift)
        cluster.engine.advance(tokens=tokens, seconds=0.01)
    together(clusters, lambda cluster: cluster.engine.settle())
    for name, value in clusters[1].weights().items():
        torch.testing.assert_close(value, before[name] + 0.75, rtol=0, atol=1e-6)


def test_a_cluster_that_comes_later_takes_over_the_shared_state() -> None:
    settings = OuterSettings(local_steps=3, delay=0)
    hub = InProcessHub(["a", "b"], timeout_seconds=30)
    clusters = [Cluster(settings, hub.exchange(name), i) for i, name in enumerate("ab")]
    run(clusters, 6, finish=False)
    late = Cluster(settings, hub.exchange("late"), 2)
    with torch.no_grad():
        for parameter in late.model.parameters():
            parameter.fill_(9.0)
    late.engine = OuterEngine(settings, ModuleWeights(late.model), hub.exchange("late"))
    with ThreadPoolExecutor(1) as pool:
        present = pool.submit(late.engine.start)
        for _ in range(3):
            for cluster in clusters:
                cluster.train()
                cluster.engine.advance(tokens=4, seconds=0.01)
        for cluster in clusters:
            cluster.keep(cluster.engine.settle())
        assert present.result() == ("a", "b", "late")
    assert late.engine.round == clusters[0].engine.round == 3
    assert clusters[0].reports[-1].participants == ("a", "b")
    for name, value in clusters[0].engine.state.tensors().items():
        assert torch.equal(late.engine.state.tensors()[name], value)
    for _ in range(3):
        for cluster in [*clusters, late]:
            cluster.train()
            cluster.engine.advance(tokens=4, seconds=0.01)
    for cluster in [*clusters, late]:
        cluster.keep(cluster.engine.settle())
    assert late.reports[-1].participants == ("a", "b", "late")
    assert late.reports[-1].shared_digest == clusters[0].reports[-1].shared_digest


def test_a_cluster_of_another_run_is_refused_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_, "_PAUSE_SECONDS", 0.0)
    settings = OuterSettings(local_steps=3, delay=0)
    hub = InProcessHub(["a", "b"], timeout_seconds=30)
    clusters = [Cluster(settings, hub.exchange(name), i) for i, name in enumerate("ab")]
    run(clusters, 3, finish=False)
    stranger = Cluster(settings, hub.exchange("stranger"), 2)
    stranger.engine = OuterEngine(
        settings,
        ModuleWeights(stranger.model),
        hub.exchange("stranger"),
        identity={"dsx.name": "other"},
    )

    def come_and_go() -> str:
        with pytest.raises(ExchangeRefused) as refusal:
            stranger.engine.start()
        stranger.engine.close()
        return str(refusal.value)

    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(come_and_go)
        for _ in range(3):
            for cluster in clusters:
                cluster.train()
                cluster.engine.advance(tokens=4, seconds=0.01)
        together(clusters, lambda cluster: cluster.keep(cluster.engine.settle()))
        assert "trains something else than stranger: dsx.name is not set there" in refusal.result()
    assert [cluster.engine.round for cluster in clusters] == [2, 2]
    assert clusters[0].reports[-1].participants == ("a", "b")
    assert clusters[1].reports[-1].shared_digest == clusters[0].reports[-1].shared_digest
