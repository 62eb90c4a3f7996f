"""The safetensors files of an HF checkpoint: which file holds which tensor."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from dsx.errors import ModelError


class CheckpointFiles:
    """A local folder or a hub name with safetensors weights, in one file or in shards.

    Attributes:
        path: as given.
        keys: names of all tensors in the checkpoint.

    Raises ModelError if there are no safetensors weights, or they can't be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        index = self._find(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self._require_single_file()
            self._file_of = dict.fromkeys(self._names_in(SAFE_WEIGHTS_NAME), SAFE_WEIGHTS_NAME)
        self.keys = frozenset(self._file_of)

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors `keys`, in that order, from the files that hold them and no others."""
        opened: dict[str, safe_open] = {}
        for key in keys:
            file = self._file_of[key]
            try:
                if file not in opened:
                    opened[file] = safe_open(self._get(file), framework="pt", device="cpu")
                yield key, opened[file].get_tensor(key)
            except ModelError:
                raise
            except Exception as error:
                raise self._unreadable(file, error) from error

    def _find(self, name: str) -> Path | None:
        try:
            found = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False)
        except Exception as error:
            raise ModelError(
                f"the checkpoint {self.path!r} can't be reached: {error}; give a folder or the "
                "name of a model on the hub"
            ) from error
        return None if found is None else Path(found)

    def _get(self, name: str) -> Path:
        found = self._find(name)
        if found is None:
            raise ModelError(
                f"the checkpoint {self.path!r} lacks {name}, which its index names; copy it there"
            )
        return found

    def _names_in(self, name: str) -> list[str]:
        try:
            with safe_open(self._get(name), framework="pt") as file:
                return list(file.keys())
        except ModelError:
            raise
        except Exception as error:
            raise self._unreadable(name, error) from error

    def _require_single_file(self) -> None:
        if self._find(SAFE_WEIGHTS_NAME) is not None:
            return
        if self._find(WEIGHTS_NAME) or self._find(WEIGHTS_INDEX_NAME):
            raise ModelError(
                f"the checkpoint {self.path!r} holds pickled weights ({WEIGHTS_NAME}), which dsx "
                "does not read; convert them: load it with AutoModelForCausalLM.from_pretrained "
                "and write it with save_pretrained, which gives safetensors"
            )
        raise ModelError(
            f"the checkpoint {self.path!r} has neither {SAFE_WEIGHTS_NAME} nor "
            f"{SAFE_WEIGHTS_INDEX_NAME}; give a folder or hub name with safetensors weights"
        )

    def _unreadable(self, file: str, error: Exception) -> ModelError:
        return ModelError(
            f"{file} of the checkpoint {self.path!r} can't be read: {error}; copy it again"
        )
