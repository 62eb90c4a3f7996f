"""What this rank's `deepspeed` launcher was told: it takes its own arguments from the words."""

import base64
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_WORLD = "--world_info="
_DEFAULT_PORT = "29500"
"""Where `deepspeed` lets rank 0 listen when it is not told."""


def go_on_command(module: str, words: Sequence[str], processes: int, hostfile: Path) -> str:
    """What to type to go on.

    Args:
        module: that `deepspeed` has started.
        words: that this rank was started with.
        processes: ranks of this cluster.
        hostfile: where to write the cluster's hosts, if there are several.
    """
    # What was saved now is newer than what `--resume` names.
    own = [word for word in without_resume(words) if not word.startswith("--local_rank")]
    launcher = launcher_words(launched_world(), processes, hostfile)
    return shlex.join([*launcher, "--module", module, *own])


def without_resume(words: Sequence[str]) -> list[str]:
    """A command's words but for `--resume`, in either way to write it."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume="):
            left.append(word)
    return left


def launched_world(words: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Devices by host, as the launcher has them; empty without a launcher.

    Args:
        words: the launcher's command line; by default that of this process's parent.
    """
    if words is None:
        words = psutil.Process(os.getppid()).cmdline()
    told = [word.removeprefix(_WORLD) for word in words if word.startswith(_WORLD)]
    if not told:
        return {}
    world = json.loads(base64.urlsafe_b64decode(told[0]))
    return {host: list(devices) for host, devices in world.items()}


def launcher_words(world: Mapping[str, Sequence[int]], processes: int, hostfile: Path) -> list[str]:
    """`deepspeed` and its arguments, by which the same ranks are started again.

    For several hosts, or for other devices than the first, these are written to `hostfile`.
    """
    port = os.environ.get("MASTER_PORT", _DEFAULT_PORT)
    # Another port than the default was chosen because a second launch shares this machine.
    chosen = [] if port == _DEFAULT_PORT else ["--master_port", port]
    (first, devices), *others = list(world.items()) or [("localhost", list(range(processes)))]
    if not others and list(devices) == list(range(len(devices))):
        return ["deepspeed", "--num_gpus", str(processes), *chosen]
    if not others:
        return ["deepspeed", "--include", f"{first}:{_listed(devices)}", *chosen]
    hostfile.parent.mkdir(parents=True, exist_ok=True)
    slots = {host: 1 + max(numbers) for host, numbers in world.items()}
    hostfile.write_text("".join(f"{host} slots={count}\n" for host, count in slots.items()))
    include = []
    if any(list(numbers) != list(range(len(numbers))) for numbers in world.values()):
        include = ["--include", "@".join(f"{host}:{_listed(n)}" for host, n in world.items())]
    address = os.environ.get("MASTER_ADDR")
    main = ["--master_addr", address] if address else []
    return ["deepspeed", "--hostfile", str(hostfile), *include, *main, *chosen]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
