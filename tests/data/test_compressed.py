import gzip
import random

import pytest

from dsx.data.compressed import gzip_bits_per_byte

TEXTS = ["def f(x):\n    return x\n" * 30, "naïve ÿ text\n" * 50]


def test_each_text_counts_as_a_gzip_file_of_its_own() -> None:
    files, _ = gzip_bits_per_byte(TEXTS)
    data = [text.encode() for text in TEXTS]
    packed = sum(len(gzip.compress(part, 9)) for part in data)
    assert files == packed * 8 / sum(len(part) for part in data)


def test_the_stream_is_the_gzip_of_all_texts_in_a_row() -> None:
    _, stream = gzip_bits_per_byte(TEXTS)
    joined = "".join(TEXTS).encode()
    assert stream == len(gzip.compress(joined, 9)) * 8 / len(joined)


def test_noise_needs_eight_bits_and_repeats_almost_none() -> None:
    noise = "".join(chr(value) for value in random.Random(0).choices(range(128), k=20_000))
    # Seven random bits a byte.
    assert gzip_bits_per_byte([noise])[0] == pytest.approx(7.05, abs=0.05)
    assert gzip_bits_per_byte(["a" * 20_000])[0] < 0.03


def test_no_text_has_no_rate() -> None:
    with pytest.raises(ValueError, match="empty"):
        gzip_bits_per_byte([""])
