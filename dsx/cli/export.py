"""`dsx export`: a run's weights as a Hugging Face checkpoint, without starting a training job."""

import argparse

from dsx.cli.common import existing_folder, output_folder

HELP = "Write a run's weights as a Hugging Face checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--run",
        dest="run_dir",  # `run` is the command itself.
        metavar="DIR",
        type=existing_folder,
        required=True,
        help="the run's folder (`dsx.run_dir`)",
    )
    parser.add_argument(
        "--output",
        metavar="HF_DIR",
        type=output_folder,
        required=True,
        help="the folder to write: empty, new, or an earlier export, which is replaced",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="of the weights (default: that in which the model was trained)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        type=existing_folder,
        help="the folder of one checkpoint (default: the newest of the run)",
    )


def run(args: argparse.Namespace) -> int:
    """Export, and say which weights these are."""
    from dsx.checkpoint.export import export_run

    print(export_run(args.run_dir, args.output, args.dtype, args.checkpoint))
    return 0
