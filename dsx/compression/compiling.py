"""Whether, and how, the block functions are compiled."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dsx.compression.levels import Levels, decode_blocks, encode_blocks
from dsx.errors import LaunchError

_F = TypeVar("_F", bound=Callable[..., None])

Encode = Callable[[Tensor, Tensor, Tensor], None]
"""(x, codes, scale_bits), as `dsx.compression.levels.encode_blocks`."""
Decode = Callable[[Tensor, Tensor, Sequence[Tensor]], None]
"""(codes, scale, parts), as `dsx.compression.levels.decode_blocks`."""


@functools.cache
def compiler_available(device_type: str = "cpu") -> bool:
    """Whether `torch.compile` has what it needs here: a C++ compiler, or Triton on a GPU."""
    if device_type == "cpu":
        return shutil.which(os.environ.get("CXX") or "g++") is not None
    return importlib.util.find_spec("triton") is not None


def require_compiler(device_type: str) -> None:
    """Raise LaunchError unless `torch.compile` can work for tensors on `device_type`."""
    if not compiler_available(device_type):
        missing = "a C++ compiler (g++, or what CXX names)" if device_type == "cpu" else "triton"
        raise LaunchError(
            f"compiled codecs on {device_type} need {missing}, which is not installed; "
            "install it or use the eager path, which gives the same bytes"
        )


@functools.cache
def encoder(
    levels: Levels, block: int, overwrite: bool, compiled: bool, device_type: str = "cpu"
) -> Encode:
    """`encode_blocks` for full blocks of `block` entries.

    Compiled, its first call takes some 15 s, less once it is in the cache on disk. The number of
    blocks may differ between calls.
    """

    def encode(x: Tensor, codes: Tensor, scale_bits: Tensor) -> None:
        encode_blocks(levels, block, x, codes, scale_bits, overwrite)

    if not compiled:
        return encode
    require_compiler(device_type)
    run = _compile(encode)

    def encode_compiled(x: Tensor, codes: Tensor, scale_bits: Tensor) -> None:
        _any_number_of_rows(x, codes, scale_bits)
        run(x, codes, scale_bits)

    return encode_compiled


@functools.cache
def decoder(levels: Levels, compiled: bool) -> Decode:
    """`decode_blocks` on the CPU; compiled under the same conditions as `encoder`."""

    def decode(codes: Tensor, scale: Tensor, parts: Sequence[Tensor]) -> None:
        decode_blocks(levels, codes, scale, parts)

    if not compiled:
        return decode
    require_compiler("cpu")
    run = _compile(decode)

    def decode_compiled(codes: Tensor, scale: Tensor, parts: Sequence[Tensor]) -> None:
        _any_number_of_rows(codes, scale, *parts)
        run(codes, scale, parts)

    return decode_compiled


def _compile(function: _F) -> _F:
    # Functions made by the same `def` share their compilations, and the limit on those, otherwise.
    compiled = torch.compile(  # type: ignore[call-overload]
        function, fullgraph=True, isolate_recompiles=True
    )
    return cast(_F, compiled)


def _any_number_of_rows(*tensors: Tensor) -> None:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
