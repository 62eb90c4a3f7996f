"""Rates, times and counts as options and their units write them: `1gbit`, `50ms`, `1t`, `40gb`."""

import re

from dsx.errors import SettingsError

_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = r"([0-9]*\.?[0-9]+)"


def read_rate(text: str, option: str) -> float:
    """`100mbit` or `1gbit/s` in bits per second, above 0. Raises SettingsError naming `option`."""
    match = re.fullmatch(_NUMBER + r"\s*([kmg]?)bit(?:/s|ps)?", text.lower())
    if match is None or float(match[1]) == 0:
        raise SettingsError(
            f"{option} {text}: expected bits per second with a unit, as in 100mbit or 1gbit"
        )
    return float(match[1]) * _POWERS[match[2]]


def read_seconds(text: str, option: str) -> float:
    """`50ms` or `0.05s` in seconds. Raises SettingsError naming `option`."""
    match = re.fullmatch(_NUMBER + r"\s*(us|ms|s)", text.lower())
    if match is None:
        raise SettingsError(f"{option} {text}: expected a time with a unit, as in 50ms or 0.2s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def read_count(text: str, option: str) -> float:
    """`300b`, `1t` or `1e12`, above 0. Raises SettingsError naming `option`."""
    match = re.fullmatch(_NUMBER + r"(?:e([0-9]{1,2}))?\s*([kmbt]?)", text.lower())
    if match is None or float(match[1]) == 0:
        raise SettingsError(f"{option} {text}: expected a number, as in 300b, 1t or 1e12")
    return float(match[1]) * 10.0 ** int(match[2] or 0) * _POWERS[match[3]]


def read_bytes(text: str, option: str) -> float:
    """`40gb` in bytes (powers of 1000), above 0. Raises SettingsError naming `option`."""
    match = re.fullmatch(_NUMBER + r"\s*([kmgt]?)b", text.lower())
    if match is None or float(match[1]) == 0:
        raise SettingsError(f"{option} {text}: expected bytes with a unit, as in 40gb or 512mb")
    return float(match[1]) * _POWERS[match[2]]
