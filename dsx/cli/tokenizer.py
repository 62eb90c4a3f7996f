"""`dsx tokenizer train`: train a byte-level BPE tokenizer on a corpus."""

import argparse
from pathlib import Path

from dsx.cli.common import output_folder

HELP = "Train a tokenizer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    train = parser.add_subparsers(dest="action", metavar="train", required=True).add_parser(
        "train",
        help="train a byte-level BPE and save it as an HF folder",
        allow_abbrev=False,
    )
    train.set_defaults(parser=train)
    train.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="files or globs, or one of: python-stdlib, a data set's name on the hub",
    )
    train.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="entries of the vocabulary"
    )
    train.add_argument(
        "--output", type=output_folder, required=True, metavar="DIR", help="a new folder"
    )
    train.add_argument(
        "--text-field", default="text", metavar="NAME", help="column with a document's text"
    )
    train.add_argument(
        "--cache-dir", type=Path, default=Path(".cache/dsx"), metavar="DIR", help="scratch space"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train the tokenizer and print what it makes of its corpus.

    Raises:
        DataError: the corpus is missing or too small, or the output folder is not empty.
    """
    from dsx.data.tokenizer_training import train_tokenizer_folder

    trained = train_tokenizer_folder(
        arguments.input[0] if len(arguments.input) == 1 else arguments.input,
        arguments.vocab_size,
        arguments.output,
        text_field=arguments.text_field,
        cache_dir=arguments.cache_dir,
    )
    print(
        f"wrote {trained.folder}: {trained.vocab_size:,} entries, trained on "
        f"{trained.documents:,} documents, {trained.text_bytes:,} bytes; "
        f"{trained.bytes_per_token:.3f} bytes per token on them"
    )
    return 0
