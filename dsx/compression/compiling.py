"""Whether, and how, the block functions are compiled."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from dsx.compression.levels import Levels, decode_blocks, encode_blocks
from dsx.errors import SettingsError

Encode = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
"""(x, codes, scales, residual or None), as `dsx.compression.levels.encode_blocks`."""
Decode = Callable[[Tensor, Tensor, Tensor], None]
"""(codes, scales, out), as `dsx.compression.levels.decode_blocks`."""


@functools.cache
def compiler_available(device_type: str = "cpu") -> bool:
    """Whether `torch.compile` has what it needs here: a C++ compiler, or Triton on a GPU."""
    if device_type == "cpu":
        return shutil.which(os.environ.get("CXX") or "g++") is not None
    return importlib.util.find_spec("triton") is not None


def require_compiler(device_type: str) -> None:
    """Raise SettingsError unless `torch.compile` can work for tensors on `device_type`."""
    if not compiler_available(device_type):
        missing = "a C++ compiler (g++, or what CXX names)" if device_type == "cpu" else "triton"
        raise SettingsError(
            f"compiled codecs on {device_type} need {missing}, which is not installed; "
            "install it or use the eager path, which gives the same bytes"
        )


@functools.cache
def encoder(levels: Levels, block: int, compiled: bool, device_type: str = "cpu") -> Encode:
    """`encode_blocks` for full blocks of `block` entries.

    Compiled, it takes some 15 s at the first call (cached on disk) and wants the same number of
    blocks at every call, or it compiles again.
    """

    def encode(x: Tensor, codes: Tensor, scales: Tensor, residual: Tensor | None) -> None:
        encode_blocks(levels, block, x, codes, scales, residual)

    if not compiled:
        return encode
    require_compiler(device_type)
    return torch.compile(encode, dynamic=False, fullgraph=True)


@functools.cache
def decoder(levels: Levels, compiled: bool, device_type: str = "cpu") -> Decode:
    """`decode_blocks`; compiled under the same conditions as `encoder`."""

    def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
        decode_blocks(levels, codes, scales, out)

    if not compiled:
        return decode
    require_compiler(device_type)
    return torch.compile(decode, dynamic=False, fullgraph=True)
