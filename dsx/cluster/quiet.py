"""DeepSpeed prints its progress while it builds an engine; a run of many ranks drowns in it."""

import contextlib
import io
from collections.abc import Iterator

from deepspeed.utils.logging import set_log_level_from_string


@contextlib.contextmanager
def quiet_deepspeed(log_level: str | None) -> Iterator[None]:
    """Let DeepSpeed log at `log_level`, warnings and worse by default.

    Inside the context its plain prints appear at "info" and "debug" only, or after an error.
    """
    set_log_level_from_string(log_level or "warning")
    if log_level in ("info", "debug"):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        print(printed.getvalue(), end="", flush=True)
        raise
