"""GPUs and the machines that hold them: memory, speed, wires.

Figures are the makers' data sheets (dense bf16, without sparsity). `a800` and `h800` are A100 and
H100 with 400 GB/s of NVLink. Prices change by the week and are an option, not a table.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dsx.errors import SettingsError
from dsx.settings.units import read_bytes, read_rate

RESERVED_BYTES = 1.5e9
"""Of a GPU: context, kernels, communication buffers, what the allocator can't use."""
UTILIZATION = 0.40
"""Share of the peak that a stage reaches while it computes, bubbles and communication not counted.
Megatron-LM reports 0.44 to 0.52 of an A100 with both counted (arXiv 2104.04473, 2205.05198), with
kernels that dsx does not have: an assumption, to be replaced by `--step-seconds` of a real run."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator and its share of the machine around it."""

    name: str
    memory: float
    """Bytes."""
    tflops: float
    """Peak of dense bf16."""
    nvlink: float
    """Bits per second and direction to the GPUs of the same node."""
    network: float
    """Bits per second and direction to other nodes of the cluster."""
    per_node: int = 8
    host_memory: float = 1e12
    """Bytes of a node."""

    @property
    def usable(self) -> float:
        """Bytes that a run may fill."""
        return self.memory - RESERVED_BYTES


_GIB = 2**30
# NVLink: data sheets give both directions together, so 600 GB/s are 2.4 Tbit/s one way.
_GPUS = (
    Gpu("a100-40g", 40 * _GIB, 312, 2.4e12, 200e9),
    Gpu("a100-80g", 80 * _GIB, 312, 2.4e12, 200e9, host_memory=2e12),
    Gpu("a800-40g", 40 * _GIB, 312, 1.6e12, 200e9),
    Gpu("a800-80g", 80 * _GIB, 312, 1.6e12, 200e9, host_memory=2e12),
    Gpu("h100-80g", 80 * _GIB, 989, 3.6e12, 400e9, host_memory=2e12),
    Gpu("h800-80g", 80 * _GIB, 989, 1.6e12, 400e9, host_memory=2e12),
    Gpu("h200-141g", 141e9, 989, 3.6e12, 400e9, host_memory=2e12),
    Gpu("b200-180g", 180e9, 2250, 7.2e12, 400e9, host_memory=2e12),
    Gpu("l40s-48g", 48 * _GIB, 362, 256e9, 100e9),
    Gpu("rtx4090-24g", 24 * _GIB, 165, 256e9, 25e9, host_memory=256e9),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}


def read_gpu(text: str) -> Gpu:
    """A name of the table; `memory=80gb,tflops=312,...`; or a JSON file with those keys.

    Raises:
        SettingsError: an unknown name or key, or a value that can't be read.
    """
    if text in GPUS:
        return GPUS[text]
    if text.endswith(".json"):
        try:
            given = {str(k): str(v) for k, v in json.loads(Path(text).read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"--gpu {text}: no JSON object can be read there: {error}"
            ) from None
    elif "=" in text:
        given = dict(part.partition("=")[::2] for part in text.split(","))
    else:
        raise SettingsError(
            f"--gpu {text}: not in the table; there are {', '.join(GPUS)}, or describe yours, as "
            "in memory=80gb,tflops=312"
        )
    return _described(text, given)


def _described(text: str, given: dict[str, str]) -> Gpu:
    known = [field.name for field in fields(Gpu)]
    unknown = [key for key in given if key not in known]
    missing = [key for key in ("memory", "tflops") if key not in given]
    if unknown or missing:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
        raise SettingsError(f"--gpu {text}: {problem}; keys are {', '.join(known)}")
    gpu = Gpu(given.get("name", "custom"), 0.0, 0.0, 1e12, 100e9)
    readers: dict[str, Callable[[str], float]] = {
        "memory": lambda v: read_bytes(v, "--gpu memory"),
        "host_memory": lambda v: read_bytes(v, "--gpu host_memory"),
        "nvlink": lambda v: read_rate(v, "--gpu nvlink"),
        "network": lambda v: read_rate(v, "--gpu network"),
        "tflops": float,
        "per_node": int,
    }
    try:
        values: dict[str, Any] = {
            key: readers[key](value) for key, value in given.items() if key != "name"
        }
    except ValueError:
        raise SettingsError(f"--gpu {text}: tflops and per_node are plain numbers") from None
    return replace(gpu, **values)
