"""One safetensors file: written tensor by tensor, with a checksum of each, and read the same way.

The safetensors package writes from a copy of everything; a checkpoint writer that shares its
machine with training wants no second copy, and the data on the disk before it reports. The format
(eight bytes of header length, a JSON header, raw data) is read by the package itself.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dsx.checkpoint.manifest import FileRecord, TensorRecord
from dsx.errors import DamagedCheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """What `write_tensors` will leave on the disk."""
    size = len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())
    records = {
        key: TensorRecord(shape=list(tensor.shape), crc32=zlib.crc32(_raw(tensor)))
        for key, tensor in tensors.items()
    }
    return FileRecord(bytes=size, tensors=records)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to a new file, and have the system bring them to the disk.

    Raises OSError (FileExistsError when `path` exists).
    """
    with path.open("xb") as file:
        file.write(_header(tensors))
        for tensor in tensors.values():
            file.write(_raw(tensor))
        file.flush()
        os.fsync(file.fileno())


def read_tensor(path: Path, key: str, record: TensorRecord) -> torch.Tensor:
    """One tensor of a file that `write_tensors` wrote.

    Raises:
        DamagedCheckpointError: the file can't be read, or its content has changed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(key)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: {key} can't be read: {error}", path
        ) from error
    if list(tensor.shape) != record.shape or zlib.crc32(_raw(tensor)) != record.crc32:
        raise DamagedCheckpointError(
            f"{path} is damaged: the checksum of {key} is not the one that was written", path
        )
    return tensor


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for key, tensor in tensors.items():
        entries[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
