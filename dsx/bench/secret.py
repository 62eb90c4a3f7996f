"""What the run secret costs: tagging and checking a message, against copying and sending it."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from dsx.bench.machine import this_machine
from dsx.exchange.authenticated import AuthenticatedExchange
from dsx.exchange.in_process import InProcessHub
from dsx.exchange.interface import gather
from dsx.exchange.secret import KEY_BYTES, RunSecret

_PATIENCE = 60.0
_RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's arguments to its parser."""
    parser.add_argument(
        "--mib", type=int, default=64, metavar="N", help="size of the message (default: 64)"
    )
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="measurements (default: 15)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print what came out."""
    result = measure(arguments.mib * 2**20, arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    (row,) = result["rows"]
    print(f"message of {arguments.mib} MiB, one thread, medians of {arguments.repeats}")
    for what in ("copy", "tag", "check"):
        print(f"{what:>10}  {row[f'{what}_seconds'] * 1e3:9.2f} ms")
    print(f"tag and check / copy and copy: {row['over_copies']:.2f}")
    for rate, part in row["part_of_sending"].items():
        print(f"tag and check / sending it at {rate}: {part:.4f}")
    return 0


def measure(size: int, repeats: int) -> dict[str, Any]:
    """Take turns in copying, tagging and checking one message of `size` bytes.

    Returns `rows` of one: medians in seconds; `over_copies`, tagging and checking over two copies;
    `part_of_sending`, the same over the time for which the message fills a line, by its rate.
    """
    names = ("a", "b")
    hub = InProcessHub(names)
    secret = RunSecret(bytes(KEY_BYTES))
    sender, receiver = (AuthenticatedExchange(hub.exchange(name), secret) for name in names)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_meet, (sender, receiver)))
    room = torch.empty(size, dtype=torch.uint8)
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"copy": [], "tag": [], "check": []}
    for _ in range(repeats + 1):
        seconds["copy"].append(_timed(partial(room.copy_, payload))[0])
        took, messages = _timed(partial(sender.seal, [payload, payload]))
        seconds["tag"].append(took)
        seconds["check"].append(_timed(partial(receiver.open, messages[1], "a"))[0])
    # The first time touches new memory.
    median = {what: statistics.median(values[1:]) for what, values in seconds.items()}
    both = median["tag"] + median["check"]
    row = {
        "bytes": size,
        **{f"{what}_seconds": value for what, value in median.items()},
        "over_copies": both / (2 * median["copy"]),
        "part_of_sending": {name: both / (8 * size / rate) for name, rate in _RATES.items()},
    }
    return {"rows": [row], "machine": this_machine()}


def _meet(end: AuthenticatedExchange) -> None:
    end.join(_PATIENCE)
    # The key of the session comes with its first message.
    gather(end, 2, torch.empty(0, dtype=torch.uint8), most=0)


def _timed(what: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = what()
    return time.perf_counter() - began, result
