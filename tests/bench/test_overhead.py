"""dsx beside a bare DeepSpeed script: the same work, and a ratio of speeds."""

import argparse
import json
from pathlib import Path

import pytest

from dsx.bench import overhead
from dsx.bench.overhead import run_overhead_bench
from dsx.errors import SettingsError
from tests.bench.tiny import settings_file


@pytest.mark.multiprocess
def test_both_sides_do_the_same_work_and_the_ratio_is_that_of_their_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    overhead.add_arguments(parser)
    file = settings_file(tmp_path)
    words = ["--json", "--deepspeed_config", str(file), "--blocks", "3", "--steps", "2"]
    assert overhead.run(parser.parse_args(words)) == 0
    result = json.loads(capsys.readouterr().out)

    assert result["loss_difference"] < 1e-6
    ratios = [ours / bare for ours, bare in zip(result["dsx"], result["bare"], strict=True)]
    assert result["ratios"] == pytest.approx(ratios)
    assert result["ratio"] == sorted(result["ratios"])[1]
    assert min(result["dsx"] + result["bare"]) > 0
    assert (result["blocks"], result["steps"], result["ranks"]) == (3, 2, 2)
    assert not (tmp_path / "untouched").exists()


def test_a_model_that_the_bare_script_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="an untied Llama only"):
        run_overhead_bench(settings_file(tmp_path, tie_word_embeddings=True))
