"""The state of a rank's random number generators, as tensors."""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch


def generator_states() -> dict[str, torch.Tensor]:
    """By generator: uint8, 1-D, on the CPU."""
    numpy_state = list(np.random.get_state(legacy=True))
    numpy_state[1] = np.asarray(numpy_state[1]).tolist()
    states = {
        "torch": torch.get_rng_state(),
        "python": _pack(random.getstate()),
        "numpy": _pack(numpy_state),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def seed_generators(seed: str) -> None:
    """Start all generators from `seed`, so that a run is the same whenever it is started."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Take over what `generator_states` gave."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = _unpack(states["python"])
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(_unpack(states["numpy"])))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _pack(state: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpack(state: torch.Tensor) -> list:
    return list(json.loads(bytes(state.numpy())))
