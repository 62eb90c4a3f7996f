"""`dsx bench codec`: how fast codecs are, beside what memory or matrix products allow."""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.compression.build import build_codec
from dsx.compression.codec import Codec
from dsx.compression.compiling import compiler_available
from dsx.compression.measure import relative_error
from dsx.errors import DsxError
from dsx.settings.codec_block import CodecSettings, CompressionSettings, LowRankCodec, TopKCodec
from dsx.settings.loading import parse_block

DEFAULT_CODECS: tuple[Any, ...] = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2",
    {"type": "int2", "scale": "mean"},
    "sign",
    {"type": "topk", "fraction": 0.03, "values": "sign"},
    {"type": "lowrank", "rank": 64, "factors": "int4"},
)
_COLUMNS = 4096
_CLEAR_PEAK = Path("/proc/self/clear_refs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec",
        dest="codecs",
        nargs="+",
        metavar="CODEC",
        help='codecs as in the settings file: int4, or JSON like {"type": "topk"}; several if none',
    )
    parser.add_argument(
        "--entries", type=int, default=1 << 24, help="entries of the fp32 matrix to encode"
    )
    parser.add_argument("--device", default="cpu", help="where the matrix is: cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; as torch chooses if not given")
    parser.add_argument("--repeats", type=int, default=5, help="of which the fastest counts")
    parser.add_argument(
        "--eager", action="store_true", help="without torch.compile, as where no compiler is"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    rows = run_codec_bench(
        [_parsed(text) for text in arguments.codecs] if arguments.codecs else DEFAULT_CODECS,
        arguments.entries,
        arguments.device,
        arguments.threads,
        False if arguments.eager else None,
        arguments.repeats,
    )
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{rows[0]['entries']} fp32 entries on {rows[0]['device']}, {rows[0]['threads']} threads, "
        f"{'compiled' if rows[0]['compiled'] else 'eager'}; GB/s of fp32 (share of the roofline)"
    )
    print(
        f"{'codec':22} {'copy':>6} {'encode':>14} {'+ residual':>14} {'decode':>14} "
        f"{'roofline':>8} {'bits':>6} {'error':>6} {'extra MB':>8}"
    )
    for row in rows:
        speeds = " ".join(
            f"{row[f'{kind}_gbps']:7.2f} ({row[f'{kind}_ratio']:4.2f})"
            for kind in ("encode", "residual", "decode")
        )
        print(
            f"{row['codec']:22} {row['copy_gbps']:6.2f} {speeds} {row['roofline']:>8} "
            f"{row['bits_per_value']:6.3f} {row['relative_error']:6.3f} "
            f"{row['peak_extra_bytes'] / 1e6:8.1f}"
        )
    return 0


def run_codec_bench(
    codecs: Sequence[Any] = DEFAULT_CODECS,
    entries: int = 1 << 24,
    device: str = "cpu",
    threads: int | None = None,
    compiled: bool | None = None,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """Encode and decode a matrix of normal values with every codec.

    Args:
        codecs: Codec settings, or what parses to such.
        entries: Of the matrix; rounded down to whole rows of 4,096 (or of a 16th, if smaller).
        device: Where the matrix is; decoding happens on the CPU in any case.
        threads: CPU threads; None: as many as torch uses now.
        compiled: Whether the integer codecs are compiled; None: where that is possible.
        repeats: Of each measurement; the shortest counts.

    Returns:
        A row for each codec. Speeds are 10^9 bytes of the fp32 matrix per second.

        * `codec`, `entries`, `device`, `threads`, `compiled`
        * `copy_gbps`: of an in-place copy of the matrix, in turns with the codec
        * `encode_gbps`; `residual_gbps`, encoding and leaving the residual in place, as with
          error feedback; `decode_gbps`
        * `roofline`: "memory" or, for low rank, "matmul"; `encode_ratio`, `residual_ratio`,
          `decode_ratio`: the share of it that is reached. For memory that is bytes that must be
          moved, over the time taken, over the same of the copy (which moves the matrix twice);
          for matmul the time of the bare matrix products over the time taken.
        * `bits_per_value`, `relative_error`
        * `peak_extra_bytes`: memory that encoding with the residual in place takes at its peak,
          besides the matrix and including the encoded body: on a CPU what the process grows by
    """
    columns = min(_COLUMNS, max(1, entries // 16))
    value = torch.randn(max(1, entries // columns), columns, device=device)
    able = compiler_available(torch.device(device).type) and compiler_available("cpu")
    compiled = able if compiled is None else compiled
    settings = [parse_codec(codec) for codec in codecs]
    with _threads(threads):
        return [_row(codec, value, compiled, max(1, repeats)) for codec in settings]


def parse_codec(codec: Any) -> CodecSettings:
    """Codec settings from what a settings file may hold; SettingsError if it is no codec."""
    return parse_block({"matrices": codec}, CompressionSettings, "a codec").matrices


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def codec_label(codec: CodecSettings) -> str:
    """A codec in a word or two: "int4", "topk 0.03 sign", "lowrank 64 int4"."""
    if isinstance(codec, TopKCodec):
        return f"topk {codec.fraction:g} {codec_label(codec.values)}"
    if isinstance(codec, LowRankCodec):
        return f"lowrank {codec.rank} {codec_label(codec.factors)}"
    return "int2 mean" if getattr(codec, "scale", "absmax") == "mean" else codec.type


def _row(settings: CodecSettings, value: Tensor, compiled: bool, repeats: int) -> dict[str, Any]:
    codec = build_codec(settings, compiled=compiled)
    work = value.clone()
    shape = tuple(value.shape)
    raw = 4 * value.numel()
    decoded = torch.empty(shape)

    body = codec.encode("w", value)
    on_gpu = value.device.type != "cpu"
    copy, encoding, residual, decoding, cpu_copy = _shortest(
        repeats,
        value,
        lambda: work.copy_(value),
        lambda: codec.encode("w", value),
        lambda: codec.encode_with_residual("w", work, overwrite=True),
        lambda: codec.decode(body, shape, decoded),
        (lambda: decoded.copy_(decoded.clone())) if on_gpu else (lambda: None),
    )
    codec.decode(body, shape, decoded)
    work.copy_(value)
    sent = body.numel()
    row: dict[str, Any] = {
        "codec": codec_label(settings),
        "entries": value.numel(),
        "device": value.device.type,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "copy_gbps": raw / copy / 1e9,
        "encode_gbps": raw / encoding / 1e9,
        "residual_gbps": raw / residual / 1e9,
        "decode_gbps": raw / decoding / 1e9,
    }
    if isinstance(settings, LowRankCodec):
        bare = _matmul_seconds(settings.rank, value, repeats)
        row |= {
            "roofline": "matmul",
            "encode_ratio": bare[0] / encoding,
            "residual_ratio": bare[1] / residual,
            "decode_ratio": bare[2] / decoding,
        }
    else:
        row |= {
            "roofline": "memory",
            "encode_ratio": (raw + sent) / encoding / (2 * raw / copy),
            "residual_ratio": (2 * raw + sent) / residual / (2 * raw / copy),
            "decode_ratio": (raw + sent) / decoding / (2 * raw / (cpu_copy if on_gpu else copy)),
        }
    return row | {
        "bits_per_value": 8 * sent / value.numel(),
        "relative_error": relative_error(value, decoded),
        "peak_extra_bytes": _peak_bytes(codec, work),
    }


def _matmul_seconds(rank: int, value: Tensor, repeats: int) -> tuple[float, float, float]:
    """Time of the products in encoding, in encoding with the residual, and in decoding."""
    rows, columns = value.shape
    p, q = torch.randn(rows, rank, device=value.device), torch.randn(columns, rank).to(value.device)
    p64, q64 = p.double(), q.double()
    p64_cpu, q64_cpu = p64.cpu(), q64.cpu()
    factors, product, decoding = _shortest(
        repeats,
        value,
        lambda: (value @ q, value.T @ p),
        lambda: p64 @ q64.T,
        lambda: p64_cpu @ q64_cpu.T,
    )
    return factors, factors + product, decoding


def _shortest(repeats: int, where: Tensor, *works: Callable[[], object]) -> list[float]:
    """The shortest time of each of `works`, in seconds.

    They are run one after the other, again and again, so that whatever else the machine does
    hits all of them; the first time does not count.
    """
    best = [float("inf")] * len(works)
    for attempt in range(repeats + 1):
        for place, work in enumerate(works):
            _wait(where)
            began = time.perf_counter()
            work()
            _wait(where)
            if attempt:
                best[place] = min(best[place], time.perf_counter() - began)
    return best


def _wait(where: Tensor) -> None:
    if where.device.type == "cuda":
        torch.cuda.synchronize(where.device)


def _peak_bytes(codec: Codec, work: Tensor) -> int:
    """Most bytes allocated at once while `work` is encoded in place, on its device."""
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
        before = torch.cuda.memory_allocated(work.device)
        codec.encode_with_residual("w", work, overwrite=True)
        return int(torch.cuda.max_memory_allocated(work.device)) - before
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # What is free, but not given back, would not show.
    _CLEAR_PEAK.write_text("5")
    before = _status("VmRSS")
    codec.encode_with_residual("w", work, overwrite=True)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """A size in bytes from the kernel's account of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise DsxError(f"the kernel does not report {key}; `dsx bench codec` needs Linux")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
