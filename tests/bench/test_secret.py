"""What authenticating costs, measured on a message that is small."""

import json

import pytest

from dsx.cli import main


def test_tagging_and_checking_are_measured_against_copying_and_sending(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["bench", "secret", "--mib", "1", "--repeats", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["bytes"] == 2**20
    both = row["tag_seconds"] + row["check_seconds"]
    assert both > 0
    assert row["over_copies"] == pytest.approx(both / (2 * row["copy_seconds"]))
    assert row["part_of_sending"]["1 Gbit/s"] == pytest.approx(both / (8 * 2**20 / 1e9))
    assert main.main(["bench", "secret", "--mib", "1", "--repeats", "3"]) == 0
    assert "tag and check / copy and copy" in capsys.readouterr().out
