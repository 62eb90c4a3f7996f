"""The exceptions that dsx raises on purpose.

Every message names the offending value, the limit it broke and the way out; `dsx.cli` prints it
without a traceback. Anything else that escapes is a fault of ours and keeps its traceback.
"""

from pathlib import Path


class DsxError(Exception):
    """Base of all errors that a user can act on."""


class SettingsError(DsxError):
    """The settings file, an override of it or an argument asks for something that can't be done,
    whatever the model and the machine: exit code 2."""


class DataError(DsxError):
    """The corpus, the tokenizer or the prepared shards are missing, damaged or unsuitable."""


class ModelError(DsxError):
    """The model can't be split, loaded or exported as asked."""


class PlanError(DsxError):
    """What is asked for fits no layout of the GPUs, or no round of the link."""


class ExchangeError(DsxError):
    """The exchange between clusters failed or was refused."""


class ExchangeRefused(ExchangeError):
    """A peer is not of this run, or no longer agrees with it: trying again won't help."""


class CheckpointError(DsxError):
    """A checkpoint is missing, foreign, damaged or can't be used with the present settings."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are not those that were written.

    Args:
        path: of the damaged file, or of the folder that lacks one.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self.path = path


class LaunchError(DsxError):
    """Processes can't be started on this machine, or one of them failed."""


class TrackingError(DsxError):
    """A run's metrics can't be written, or are missing or damaged."""
