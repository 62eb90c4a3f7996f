"""What gzip makes of a text: the yardstick beside a model's bits per byte."""

import gzip
import zlib
from collections.abc import Iterable

_LEVEL = 9


def gzip_bits_per_byte(texts: Iterable[str]) -> tuple[float, float]:
    """Bits that `gzip -9` needs per UTF-8 byte: of each text as a file, and of all as one stream.

    Returns:
        `(files, stream)`; the second is smaller, since a stream has one header and remembers up to
        32 KiB of the text before.

    Raises:
        ValueError: the texts are empty.
    """
    raw = files = stream = 0
    # wbits 31 is the gzip container.
    joined = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
    for text in texts:
        data = text.encode()
        raw += len(data)
        files += len(gzip.compress(data, _LEVEL, mtime=0))
        stream += len(joined.compress(data))
    stream += len(joined.flush())
    if raw == 0:
        raise ValueError("bits per byte of an empty text are undefined")
    return files * 8 / raw, stream * 8 / raw
