"""Decisions that a cluster's ranks make together, and what an engine refuses."""

import math
from typing import Any

import pytest

from tests.cluster.reference import settings_for
from tests.distributed import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    settings = settings_for(2, 2, 2, bf16=request.param == "bf16")
    raw = settings.model_dump(mode="json", exclude_none=True)
    return run_ranks("tests.cluster.workers:decide_and_refuse", 4, raw)


def test_all_ranks_come_to_one_decision(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["maximum"] == [3.0, 0.0, 0.5]
        assert rank["total"] == [2.0**54, 6.0]
        assert rank["broadcast"] == {"from": 0}
        assert rank["gather"] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_cluster_on_one_machine_listens_on_the_loopback_address_alone(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["listening"] == {"127.0.0.1"}


def test_fewer_batches_than_replicas_are_evaluated_all_the_same(
    ranks: list[dict[str, Any]],
) -> None:
    assert len({rank["eval-one"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["eval-same-three"] == pytest.approx(rank["eval-one"], rel=1e-6)
        assert rank["eval-none"].startswith("ValueError: an evaluation needs at least one")
        assert "has the shape (2, 15), but that of training is (2, 16)" in rank["eval-short"]


def test_replicas_share_a_stages_tensors(ranks: list[dict[str, Any]]) -> None:
    for first, second in (ranks[:2], ranks[2:]):
        assert not first["owned"].keys() & second["owned"].keys()
        loads = [sum(rank["owned"].values()) for rank in (first, second)]
        assert abs(loads[0] - loads[1]) <= max([*first["owned"].values()])
    names = {name for rank in ranks for name in rank["owned"]}
    assert {"model.embed_tokens.weight", "lm_head.weight"} < names


def test_an_optimizer_that_has_not_stepped_has_moments_of_zero(
    ranks: list[dict[str, Any]],
) -> None:
    assert [(rank["steps-before"], rank["moments-before"]) for rank in ranks] == [(0, 0.0)] * 4


def test_a_step_without_finite_gradients_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        loss, norm = rank["poisoned"]
        assert math.isnan(loss)
        assert norm == math.inf
        assert rank["poison-spread"] == []
        assert all(map(math.isfinite, rank["cured"]))


def test_what_cannot_be_done_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["no-port"].startswith("LaunchError: the environment has no MASTER_PORT")
        assert "4 ranks can't hold 3 stages" in rank["three-stages"]
        assert rank["store-fewer"].startswith("ValueError: every owned tensor must be given")
        assert rank["kind"].startswith("ValueError: the inner optimizer has no 'momentum_buffer'")


def test_a_tensor_of_another_shape_or_format_is_not_stored() -> None:
    raw = settings_for(1, 1, 1).model_dump(mode="json", exclude_none=True)
    ((shape, dtype),) = run_ranks("tests.cluster.workers:store_wrong", 1, raw)
    assert "must be fp32 of shape (64, 16), but is torch.float32 of shape (1, 16)" in shape
    assert "must be fp32 of shape (64, 16), but is torch.bfloat16" in dtype
