"""dsx beside a bare DeepSpeed script: the same work, and a ratio of speeds."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from dsx.bench import overhead
from dsx.bench.overhead import run_overhead_bench
from dsx.errors import SettingsError

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def settings_file(folder: Path, **model: Any) -> Path:
    text = folder / "text"
    text.mkdir()
    for document in range(60):
        words = (f"document {document} says {document * line}" for line in range(40))
        (text / f"{document}.txt").write_text("\n".join(words))
    file = folder / "settings.json"
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "name": "bench",
            "run_dir": str(folder / "untouched"),
            "model": {"config": {**MODEL, **model}},
            "pipeline": {"stages": 2},
            "data": {
                "source": str(text / "*.txt"),
                "seq_len": 16,
                "heldout_fraction": 0.2,
                "cache_dir": str(folder / "cache"),
            },
            "tokenizer": {"vocab_size": 300},
            "training": {"steps": 4},
        },
    }
    file.write_text(json.dumps(settings))
    return file


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
