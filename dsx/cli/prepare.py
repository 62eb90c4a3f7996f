"""`dsx prepare`: build or reuse the tokenizer and the token shards of a settings file."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="FILE", help="the settings file"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override settings, for example dsx.data.seq_len=512",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the data and print what there is now.

    Raises:
        SettingsError: the settings are wrong.
        DataError: the data can't be prepared.
    """
    from dsx.data.prepare import prepare
    from dsx.data.summary import describe
    from dsx.settings.loading import load_settings

    print(describe(prepare(load_settings(args.deepspeed_config, args.overrides))))
    return 0
