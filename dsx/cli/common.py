"""Arguments that several commands share."""

import argparse

from dsx.settings import Settings, load_settings


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """`--deepspeed_config FILE` and `--set KEY=VALUE`, to be read by `settings_from`."""
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE",
        help="the settings: DeepSpeed's JSON with a `dsx` block (see docs/configuration.md)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override settings, as in dsx.outer.local_steps=10",
    )


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The checked settings that the arguments name. Raises `SettingsError`."""
    return load_settings(arguments.deepspeed_config, arguments.overrides)


def settings_arguments(arguments: argparse.Namespace) -> list[str]:
    """The same arguments again, for a process started with the same settings."""
    overrides = [word for override in arguments.overrides for word in ("--set", override)]
    return ["--deepspeed_config", arguments.deepspeed_config, *overrides]
