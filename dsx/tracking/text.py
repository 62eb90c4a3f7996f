"""Numbers as people read them. None and NaN become a dash."""

import math

DASH = "\N{EN DASH}"


def number_text(value: float | None, digits: int = 4) -> str:
    """A plain decimal number."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:,.{digits}f}"


def count_text(value: float | None) -> str:
    """1234567 -> "1.23 M". Exact below 10,000."""
    if value is None or math.isnan(value):
        return DASH
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    return _scaled(value, ("", "k", "M", "B", "T"))


def bytes_text(value: float | None) -> str:
    """In powers of 1000: 1234567 -> "1.23 MB"."""
    if value is None or math.isnan(value):
        return DASH
    if abs(value) < 1000:
        return f"{value:.0f} B"
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds_text(value: float | None, digits: int = 2) -> str:
    """0.25 -> "0.25 s", 75 -> "1 min 15 s", 4000 -> "1 h 6 min"; `digits`: at most below 1 s."""
    if value is None or math.isnan(value):
        return DASH
    if value < 60:
        return f"{value:.{min(digits, 2 if value < 1 else 1)}f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value /= 1000
        power += 1
    digits = max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f} {units[power]}".rstrip()
