"""`dsx bench peers`: torchft's own DiLoCo beside ours, and dsx, on one slow link.

All clusters are single processes here: torchft's DiLoCo wraps one module, not a pipeline.
"""

import argparse

from dsx.bench.link.command import add_common_arguments, compare
from dsx.bench.link.methods import TORCHFT

_ONE_STAGE = ("dsx.pipeline.stages=1",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        DsxError: as `dsx.bench.link.bench.run_link_bench`.
    """
    return compare(arguments, [TORCHFT, "diloco-fp32", "diloco-fp16", "dsx"], _ONE_STAGE)
