"""Which part of a failed cluster's log is shown."""

from pathlib import Path

import pytest

from dsx.cluster.failure import explain_exit, first_error, is_consequence

TRACEBACK = "Traceback (most recent call last):\n  File x\nKeyError: 'first'"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "c0.log"


def test_the_first_dsx_error_is_shown_with_its_indented_lines(log: Path):
    log.write_text(
        f"start\n{TRACEBACK}\ndsx: SettingsError: two problems:\n  one\n  two\nother\n"
        "dsx: ExchangeError: later\n"
    )
    assert first_error(log) == "SettingsError: two problems:\n  one\n  two"


def test_without_one_the_first_traceback_near_the_end_is_shown(log: Path):
    later = TRACEBACK.replace("first", "second")
    log.write_text(
        f"start\n{TRACEBACK}\n{later}\n"
        "[2026-01-01 00:00:00,000] [INFO] [launch.py:325:sigkill_handler] Killing subprocess 7\n"
    )
    shown = first_error(log)
    assert shown.startswith(TRACEBACK)
    assert "Killing subprocess" not in shown


def test_without_a_traceback_the_last_lines_are_shown(log: Path):
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    assert first_error(log).splitlines() == [f"line {number}" for number in range(85, 100)]


def test_what_was_for_the_progress_display_is_not_shown(log: Path):
    log.write_text("out of memory\n" + "[dsx] phase: evaluating\n" * 20)
    assert first_error(log) == "out of memory"


def test_an_exit_code_that_is_a_signal_names_it():
    assert explain_exit(1) == "exit code 1"
    assert explain_exit(75) == "exit code 75"
    assert explain_exit(247) == (
        "exit code 247 (a process was ended by SIGKILL; the system does that when memory runs out)"
    )
    assert explain_exit(245) == "exit code 245 (a process was ended by SIGSEGV)"


def test_what_an_earlier_start_wrote_is_not_shown(log: Path):
    log.write_text("dsx: DataError: old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("dsx: DataError: new\n")
    assert first_error(log, start) == "DataError: new"


def test_a_cluster_that_said_nothing_is_told_so(log: Path):
    log.write_text("")
    assert first_error(log) == "it left no output"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ExchangeError: peer c1 was lost", True),
        (f"{TRACEBACK}\ndsx.errors.ExchangeError: lost", True),
        ("DataError: shard 3 is damaged", False),
        (TRACEBACK, False),
    ],
)
def test_a_broken_exchange_is_a_consequence(error: str, expected: bool):
    assert is_consequence(error) is expected
