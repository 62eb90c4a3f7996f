"""The slow link that simulated runs are placed on: what gives them a time axis."""

import re
from dataclasses import dataclass

from dsx.errors import SettingsError
from dsx.simulation.result import RunResult

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Link:
    """Every cluster's way to the others.

    `bandwidth` in bits per second and direction, `latency` in seconds, of one message.
    """

    bandwidth: float
    latency: float

    def exchange_seconds(self, sent: float) -> float:
        """For an exchange in which every cluster sends `sent` bytes."""
        return self.latency + 8 * sent / self.bandwidth

    def run_seconds(self, result: RunResult, step_seconds: float, steps: int) -> float:
        """Until `steps` inner steps are made, all clusters working at the same time.

        An exchange hides behind the `delay` inner steps that follow its boundary; for what it
        takes longer, training stands still.
        """
        compute = steps * step_seconds
        if result.bytes_per_round == 0:
            return compute
        exchange = self.exchange_seconds(result.bytes_per_round)
        stalled = max(0.0, exchange - result.delay * step_seconds)
        return compute + (steps // result.local_steps) * stalled


def read_bandwidth(text: str) -> float:
    """`100mbit` in bits per second. Raises SettingsError."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmg]?)bit(?:/s|ps)?", text.lower())
    if match is None or _number(match[1]) <= 0:
        raise SettingsError(
            f"--link {text}: expected bits per second with a unit, as in 100mbit or 1gbit"
        )
    return _number(match[1]) * _UNITS[match[2]]


def read_seconds(text: str) -> float:
    """`50ms` or `0.05s` in seconds. Raises SettingsError."""
    match = re.fullmatch(r"([0-9.]+)\s*(us|ms|s)", text.lower())
    if match is None or _number(match[1]) < 0:
        raise SettingsError(f"--latency {text}: expected a time with a unit, as in 50ms or 0.2s")
    return _number(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
