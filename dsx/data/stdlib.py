"""`python-stdlib`, the default corpus: the running interpreter's own library, as source text."""

import sysconfig
from pathlib import Path

SOURCE = "python-stdlib"
# Tests, what is installed beside the library, demos; and two packages that are generated tables
# (character maps, the printed manual) rather than code.
_LEFT_OUT = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_bundled",
        "lib-dynload",
        "idlelib",
        "turtledemo",
        "encodings",
        "pydoc_data",
    }
)


def stdlib_files() -> list[Path]:
    """Sorted `.py` files of the standard library, one document each.

    Left out are tests, site-packages, idlelib and turtledemo, the generated tables of `encodings`
    and `pydoc_data`, and `_sysconfigdata*`, which describes the machine that built Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = (
        path
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1])
        and not path.name.startswith("_sysconfigdata")
    )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
