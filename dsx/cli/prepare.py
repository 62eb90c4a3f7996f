"""`dsx prepare`: build or reuse the tokenizer and the token shards of a settings file."""

import argparse

from dsx.cli.common import add_settings_arguments, settings_from

HELP = "Turn text into a tokenizer and packed token shards."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_settings_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data and print what there is now.

    The model is planned before: a wrong one must not show after hours of tokenizing only.

    Raises:
        SettingsError: the settings are wrong.
        ModelError: the model that they ask for is impossible, or can't be split into its stages.
        DataError: the data can't be prepared, or its tokenizer does not fit the model.
    """
    # Importing `datasets` takes seconds, which wrong settings need not wait for.
    settings = settings_from(arguments)
    from dsx.data.prepare import prepare
    from dsx.data.summary import describe
    from dsx.training.preflight import plan_model

    plan, _ = plan_model(settings)
    print(describe(prepare(settings, plan.vocab_size)))
    return 0
