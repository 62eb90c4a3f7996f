"""The compiled path: the same bytes, the same residual, the same values."""

import shutil

import pytest
import torch

from dsx.compression import compiling
from dsx.compression.build import build_quantizer
from dsx.errors import LaunchError
from dsx.settings.codec_block import Int4Codec


@pytest.fixture
def no_compiler(monkeypatch):
    compiling.compiler_available.cache_clear()
    compiling.encoder.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda command: None)
    yield
    compiling.compiler_available.cache_clear()


def test_int4_compiled_gives_the_bytes_of_the_eager_path():
    eager, compiled = build_quantizer(Int4Codec()), build_quantizer(Int4Codec(), compiled=True)
    generator = torch.Generator().manual_seed(0)
    for length in (128 * 300 + 77, 128 * 2):
        flat = torch.randn(length, generator=generator)
        flat *= 10.0 ** torch.randint(-40, 30, (length,), generator=generator)
        flat[128:256] = 0
        body = eager.encode(flat)
        assert compiled.encode(flat).equal(body)
        expected, residual = flat.clone(), flat.clone()
        assert eager.encode(expected, overwrite=True).equal(body)
        assert compiled.encode(residual, overwrite=True).equal(body)
        assert residual.equal(expected)
        assert compiled.decode(body, length).equal(eager.decode(body, length))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_compiling_is_refused_and_eager_works():
    flat = torch.randn(1000)
    with pytest.raises(LaunchError, match="C\\+\\+ compiler"):
        build_quantizer(Int4Codec(), compiled=True).encode(flat)
    assert build_quantizer(Int4Codec()).encode(flat).numel() == 516
