"""Simulated runs against what theory, and runs without an outer engine, must give."""

from collections.abc import Callable

import pytest
import torch

from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.simulation.inner import InnerTraining, build_model
from dsx.simulation.result import RunResult
from dsx.simulation.run import all_reduce_bytes

Simulate = Callable[..., RunResult]
AVERAGING = ("dsx.outer.lr=1", "dsx.outer.momentum=0")


def test_one_cluster_that_averages_with_itself_is_the_cluster_alone(simulate: Simulate) -> None:
    alone = simulate("single", 1)
    for delay in ("dsx.outer.delay=0", "dsx.outer.delay=1"):
        clustered = simulate("clusters", 1, *AVERAGING, delay)
        assert clustered.loss == pytest.approx(alone.loss, abs=1e-5)


def test_two_clusters_that_average_every_sgd_step_are_one_all_reduce_run(
    simulate: Simulate,
) -> None:
    sgd = 'optimizer={"type": "SGD", "params": {"lr": 0.5}}'
    # Clipping acts on each cluster's own gradient, so it must not act at all.
    free = (sgd, "gradient_clipping=1000.0")
    joined = simulate("allreduce", 2, *free)
    clustered = simulate(
        "clusters", 2, *free, *AVERAGING, "dsx.outer.local_steps=1", "dsx.outer.delay=0"
    )
    assert clustered.loss == pytest.approx(joined.loss, abs=1e-5)
    assert simulate("single", 2, *free).loss != pytest.approx(joined.loss, abs=1e-3)


def test_a_run_repeats_to_the_last_bit(simulate: Simulate) -> None:
    first, second = simulate("clusters", 2), simulate("clusters", 2)
    # (The bytes vary by the digits of the seconds that headers report.)
    assert [point.loss for point in first.curve] == [point.loss for point in second.curve]
    assert simulate("clusters", 2, "dsx.seed=1").loss != first.loss


def test_bytes_are_those_of_one_fp32_payload_a_round(simulate: Simulate) -> None:
    result = simulate("clusters", 2)
    payload = 4 * result.parameters
    assert result.rounds == 4
    # Headers and the messages' frames come on top.
    assert payload < result.bytes_per_round < payload + 4096
    assert result.bytes_per_step == pytest.approx(result.bytes_per_round / 3)
    assert result.fewer_bytes == pytest.approx(payload / result.bytes_per_step)
    assert simulate("allreduce", 2).bytes_per_step == payload
    assert simulate("single", 2).fewer_bytes is None


def test_all_reduce_bytes_are_those_of_a_ring() -> None:
    assert all_reduce_bytes(100, 1) == 0
    assert all_reduce_bytes(100, 2) == 400
    assert all_reduce_bytes(100, 4) == 600


def test_the_curve_has_a_point_at_every_evaluation_and_at_the_end(simulate: Simulate) -> None:
    tokens_of_a_step = 2 * 2 * 16
    result = simulate("clusters", 2)
    assert [point.step for point in result.curve] == [6, 12]
    assert [point.tokens for point in result.curve] == [6 * tokens_of_a_step, result.tokens]
    assert result.loss == result.curve[-1].loss
    assert 0 < result.curve[0].bytes < result.curve[1].bytes
    assert simulate("single", 2).tokens == result.tokens / 2


def test_auto_stands_for_a_fifth_of_a_round(simulate: Simulate) -> None:
    lengths = ("dsx.outer.local_steps=6",)
    auto = simulate("clusters", 2, *lengths, "dsx.outer.delay=auto")
    assert auto.delay == 2
    assert auto.loss == simulate("clusters", 2, *lengths, "dsx.outer.delay=2").loss


def test_the_model_starts_from_the_weights_of_the_real_run(spec: Callable[..., object]) -> None:
    settings = spec("single", 1).settings()  # type: ignore[attr-defined]
    plan = ModelPlan(load_config(settings.dsx.model))
    (whole,) = plan.partition(1)
    expected = dict(plan.build_stage(whole, settings.dsx.seed).named_parameters())
    for name, value in build_model(settings).named_parameters():
        assert torch.equal(value, expected[name])


def test_muon_takes_the_layers_matrices_and_adamw_the_rest(
    spec: Callable[..., object], simulate: Simulate
) -> None:
    settings = spec("single", 1).settings()  # type: ignore[attr-defined]
    training = InnerTraining(settings, "muon", torch.device("cpu"))
    adamw, muon = training._optimizers
    shapes = [tuple(p.shape) for group in muon.param_groups for p in group["params"]]
    assert len(shapes) == 7
    assert all(shape == (16, 16) for shape in shapes)
    others = [p for group in adamw.param_groups for p in group["params"]]
    assert len(others) + len(shapes) == len(list(training.model.parameters()))
    muon_loss = simulate("single", 1, inner="muon").loss
    assert muon_loss < 5.7, "below the entropy of a uniform guess over 300 tokens"
    assert muon_loss != simulate("single", 1).loss
