"""Processes of a cluster against stages and batch size."""

import pytest

from dsx.errors import SettingsError
from dsx.settings import check_layout, parse_settings
from tests.settings.files import changed, valid


@pytest.mark.parametrize(
    ("stages", "processes", "replicas"), [(1, 1, 1), (2, 2, 1), (2, 6, 3), (4, 8, 2)]
)
def test_replicas_are_processes_over_stages(stages: int, processes: int, replicas: int) -> None:
    settings = parse_settings(changed(**{"dsx.pipeline.stages": stages}))

    assert check_layout(settings, processes) == replicas


@pytest.mark.parametrize(
    ("processes", "advice"),
    [(1, "start 2 or 4 processes"), (5, "start 4 or 6 processes"), (0, "start 2 or 4 processes")],
)
def test_processes_that_make_no_whole_pipelines_are_refused(processes: int, advice: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        check_layout(parse_settings(valid()), processes)

    message = str(refusal.value)
    assert message.startswith(f"{processes} processes can't be split into pipelines of 2 stages")
    assert advice in message
    assert "dsx.pipeline.stages" in message


def test_the_batch_size_is_micro_batch_times_accumulation_times_replicas() -> None:
    settings = parse_settings(changed(train_batch_size=24))

    assert check_layout(settings, processes=6) == 3


def test_another_batch_size_is_refused_with_the_accumulation_that_would_give_it() -> None:
    settings = parse_settings(changed(train_batch_size=32))

    with pytest.raises(SettingsError) as refusal:
        check_layout(settings, processes=4)

    message = str(refusal.value)
    assert "train_batch_size: is 32, but 4 (train_micro_batch_size_per_gpu) x 2" in message
    assert "x 2 replicas (4 processes / 2 stages) = 16" in message
    assert "set gradient_accumulation_steps to 4" in message


def test_a_batch_size_that_no_accumulation_gives_gets_no_such_advice() -> None:
    settings = parse_settings(changed(train_batch_size=8))

    with pytest.raises(SettingsError) as refusal:
        check_layout(settings, processes=6)

    assert "set gradient_accumulation_steps" not in str(refusal.value)
    assert "set it to 24 or leave it out" in str(refusal.value)
