"""Values with units, as options write them."""

from collections.abc import Callable

import pytest

from dsx.errors import SettingsError
from dsx.settings.units import read_bytes, read_count, read_rate, read_seconds


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_rate, "1gbit", 1e9),
        (read_rate, "0.5 Mbit/s", 5e5),
        (read_rate, "64kbitps", 64e3),
        (read_seconds, "50ms", 0.05),
        (read_seconds, "0s", 0.0),
        (read_seconds, "20us", 2e-5),
        (read_count, "1t", 1e12),
        (read_count, "300B", 3e11),
        (read_count, "1.5e12", 1.5e12),
        (read_count, "1000", 1000),
        (read_bytes, "40gb", 4e10),
        (read_bytes, "512 MB", 5.12e8),
    ],
)
def test_a_value_with_a_unit_is_read(
    read: Callable[[str, str], float], text: str, value: float
) -> None:
    assert read(text, "--option") == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_rate, "1"),
        (read_rate, "0mbit"),
        (read_rate, "1gb"),
        (read_rate, "..bit"),
        (read_seconds, "5"),
        (read_seconds, "-1ms"),
        (read_count, "many"),
        (read_count, "0"),
        (read_count, "1e999"),
        (read_bytes, "40"),
    ],
)
def test_anything_else_is_refused_with_the_option_and_an_example(
    read: Callable[[str, str], float], text: str
) -> None:
    with pytest.raises(SettingsError, match=r"--option .*as in"):
        read(text, "--option")
