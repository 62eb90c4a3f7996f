"""What a measurement was made on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from dsx.cluster.launch import usable_cores

_PACKAGES = ("torch", "deepspeed", "transformers", "torchft")


def this_machine() -> dict[str, object]:
    """Processor, cores that may be used, memory, load of the last minute, versions."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
