"""Whether the Hugging Face hub can be reached from here, found out once and quickly.

Left alone, its client asks again for half a minute and tells every failure, for each file of a
name. Where nobody answers, the client is told so, and looks into the local cache at once.
"""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

_CONNECT_SECONDS = 3.0


@functools.cache
def hub_is_reachable() -> bool:
    """Call it before a name is looked up on the hub; False: only what is cached can be had."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies() or _answers(constants.ENDPOINT):
        return True
    # Read once, when they are imported, by the libraries that come later and those that are here.
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets.config" in sys.modules:
        sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return False


def where_names_are_looked_up() -> str:
    """For an error about a name that was not found."""
    if hub_is_reachable():
        return "on the hub"
    return "in the local cache of the hub, which can't be reached from here"


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False
