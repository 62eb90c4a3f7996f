"""Settings of an engine that exchanges after every step, and waits for it."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from dsx.errors import SettingsError
from dsx.settings.dsx_block import OuterSettings
from dsx.settings.loading import parse_block


def read_outer(text: str) -> dict[str, Any]:
    """An argument's value as some keys of `dsx.outer`."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is {text}, which is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f"is {text}; give a JSON object {{...}}")
    return read


def outer_settings(given: Mapping[str, Any], clusters: int) -> OuterSettings:
    """Of so many clusters. Raises SettingsError where `given` is wrong, or has what is set here."""
    own = {"local_steps": 1, "delay": 0, "start_clusters": clusters, "adapt": {}}
    for key in own:
        if key in given:
            raise SettingsError(
                f"--outer: {key}: the clusters of this bench exchange after every step and wait, "
                "so it can't be given; leave it out"
            )
    return parse_block({**given, **own}, OuterSettings, "--outer")
