"""`dsx bench overhead`: what dsx costs beside a bare DeepSpeed script.

One cluster trains, without an exchange, exactly as `dsx.train` does it (data, learning rate,
metrics, asking whether it should end); a bare script (`dsx.bench.bare`) trains the same model from
the same weights on the same batches. Both live in the same processes and take turns at every step,
so that whatever else the machine does hits both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsx.cluster.launch import deepspeed_command, free_ports, usable_cores, visible_gpus
from dsx.errors import LaunchError, SettingsError
from dsx.settings import Settings, load_settings

QUICKSTART = "configs/quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--blocks", type=int, default=5, help="measurements; the median counts")
    parser.add_argument(
        "--steps", type=int, default=20, help="inner steps of each side in a measurement"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    result = run_overhead_bench(
        arguments.deepspeed_config, arguments.overrides, arguments.blocks, arguments.steps
    )
    if arguments.json:
        print(json.dumps(result))
        return 0
    print("tokens/s       dsx      bare     ratio")
    for ours, bare, ratio in zip(result["dsx"], result["bare"], result["ratios"], strict=True):
        print(f"         {ours:9.0f} {bare:9.0f} {ratio:9.3f}")
    print(f"median ratio {result['ratio']:.3f}")
    print(f"relative difference of the first losses {result['loss_difference']:.1e}")
    return 0


def run_overhead_bench(
    deepspeed_config: str | Path,
    overrides: Sequence[str] = (),
    blocks: int = 5,
    steps: int = 20,
) -> dict[str, Any]:
    """Measure on `dsx.pipeline.stages` ranks that it starts on this machine.

    Args:
        deepspeed_config: a settings file with an untied Llama.
        overrides: as for `load_settings`.
        blocks: measurements, of which the median counts.
        steps: inner steps of each side in a measurement; who comes first alternates.

    Returns:
        `ratio`: median over the blocks of tokens/s of dsx over tokens/s of the bare script;
        `ratios`, `dsx`, `bare`: of each block, the latter two in tokens/s, from the median of its
        steps' times;
        `loss_difference`: relative difference of the two sides' losses in their first step.

    Raises:
        SettingsError: the model isn't one that the bare script has.
        LaunchError: the ranks could not be started, or failed.
    """
    settings = load_settings(deepspeed_config, overrides)
    _require_plain_llama(settings)
    ranks = settings.dsx.pipeline.stages
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    if not visible_gpus():
        environment["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as folder:
        request = Path(folder) / "request.json"
        answer = Path(folder) / "answer.json"
        request.write_text(
            json.dumps(
                {
                    "settings": settings.model_dump(mode="json", exclude_none=True),
                    "blocks": blocks,
                    "steps": steps,
                    "run_dir": str(Path(folder) / "run"),
                    "answer": str(answer),
                }
            )
        )
        command = [
            str(deepspeed_command()),
            *("--num_gpus", str(ranks), "--master_port", str(free_ports(1)[0])),
            *("--module", "dsx.bench.overhead_rank", "--request", str(request)),
        ]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace"
        )
        if done.returncode or not answer.exists():
            print(done.stdout + done.stderr, file=sys.stderr)
            raise LaunchError(
                f"the ranks of the bench ended with exit code {done.returncode}; their output is "
                "above"
            )
        seconds = json.loads(answer.read_text())
    tokens = (
        settings.train_micro_batch_size_per_gpu
        * settings.gradient_accumulation_steps
        * settings.dsx.data.seq_len
    )
    ours = [tokens / second for second in seconds["dsx"]]
    bare = [tokens / second for second in seconds["bare"]]
    ratios = [own / other for own, other in zip(ours, bare, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "dsx": ours,
        "bare": bare,
        "loss_difference": seconds["loss_difference"],
        "blocks": blocks,
        "steps": steps,
        "ranks": ranks,
    }


def _require_plain_llama(settings: Settings) -> None:
    config = settings.dsx.model.config or {}
    if config.get("model_type") != "llama" or config.get("tie_word_embeddings", False):
        raise SettingsError(
            "the bare script that dsx is measured against has an untied Llama only: give "
            'dsx.model.config with "model_type": "llama" and "tie_word_embeddings": false'
        )
