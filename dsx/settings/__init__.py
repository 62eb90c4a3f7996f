"""The settings file: DeepSpeed's own keys plus the `dsx` block, typed and checked.

`load_settings` is the way in; `Settings` is what the rest of dsx works with.
"""

from dsx.settings.checks import check_layout
from dsx.settings.loading import load_settings, parse_settings
from dsx.settings.problems import Implied
from dsx.settings.settings import Settings

__all__ = ["Implied", "Settings", "check_layout", "load_settings", "parse_settings"]
