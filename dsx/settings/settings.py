"""The whole settings file."""

from pydantic import Field

from dsx.settings.deepspeed_keys import DeepSpeedSettings
from dsx.settings.dsx_block import DsxSettings


class Settings(DeepSpeedSettings):
    """DeepSpeed's own keys plus the `dsx` block."""

    dsx: DsxSettings = Field(..., description="Everything that DeepSpeed's own keys do not say.")
