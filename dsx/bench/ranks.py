"""Starts the ranks of a bench: one cluster through the `deepspeed` command."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.cluster.launch import deepspeed_command, free_ports, usable_cores, visible_gpus
from dsx.errors import LaunchError


def run_bench_ranks(module: str, ranks: int, request: Mapping[str, Any]) -> Any:
    """Run `module --request FILE` on `ranks` ranks of this machine.

    Args:
        request: JSON; `answer` joins it, the file into which rank 0 writes its JSON.

    Returns:
        what rank 0 wrote.

    Raises:
        LaunchError: the ranks could not be started, or failed.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    if not visible_gpus():
        environment["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as folder:
        file, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        file.write_text(json.dumps({**request, "answer": str(answer)}))
        command = [
            str(deepspeed_command()),
            *("--num_gpus", str(ranks), "--master_port", str(free_ports(1)[0])),
            *("--module", module, "--request", str(file)),
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
        return json.loads(answer.read_text())
