"""What the ranks of the security test do."""

import contextlib
import io

from dsx import train


def launch(words: list[str]) -> tuple[int, str]:
    """`dsx.train` with these arguments: its exit code and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        code = train.main(words)
    return code, printed.getvalue()
