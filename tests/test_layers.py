"""The order of the packages: imports go downwards only, and heavy libraries stay in one place."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "dsx"
MAX_LINES = 500

# From the top down. A package may import from the lines below its own, and from itself.
LAYERS = (
    {"train"},
    {"cli"},
    {"bench", "simulation", "planning"},
    {"training"},
    {"tracking", "checkpoint"},
    {"cluster"},
    {"models", "data"},
    {"outer"},
    {"exchange", "compression"},
    {"settings"},
    {"errors", "hub", "spans"},
    {"__init__"},
)
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}

# Library -> the only places that may import it; a folder means everything in it.
ONLY_IN = {
    "deepspeed": ("cluster/", "bench/bare.py"),
    "transformers": ("models/", "data/tokenizer.py", "bench/bare.py"),
    "torchft": ("exchange/", "bench/link/torchft_rank.py"),
    "wandb": ("tracking/wandb.py",),
}
# What the console entry and the settings need must stay quick to import.
LIGHT = {"__init__", "errors", "settings"}
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "torchft", "wandb", "numpy"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(module: str) -> str:
    """`dsx.outer.engine` -> `outer`; `dsx` -> `__init__`."""
    return [*module.split("."), "__init__"][1]


NAMES = {dotted(path) for path in MODULES}


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, wherever in it the import stands."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in NAMES else base


@pytest.mark.parametrize("path", MODULES, ids=inside)
def test_imports_go_downwards_only(path: Path) -> None:
    own = unit(dotted(path))
    assert own in DEPTH, f"{own} has no layer; give it one"
    for module in imports(path):
        if module.split(".")[0] == "dsx" and unit(module) != own:
            assert DEPTH[unit(module)] > DEPTH[own], f"{inside(path)} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=inside)
def test_heavy_libraries_are_imported_in_their_one_place(path: Path) -> None:
    for module in imports(path):
        library = module.split(".")[0]
        places = ONLY_IN.get(library, ("",))
        assert inside(path).startswith(places), f"{inside(path)} imports {module}"
        if unit(dotted(path)) in LIGHT:
            assert library not in HEAVY, f"{inside(path)} imports {module}"


def test_the_places_of_heavy_libraries_exist() -> None:
    for library, places in ONLY_IN.items():
        for place in places:
            assert (PACKAGE / place).exists(), f"{library} may be imported in {place}"


def runs_first(path: Path) -> set[str]:
    """The modules that importing `path` runs: what it names, and the packages that these lie in."""
    own = dotted(path)
    named = {module for module in imports(path) if module in NAMES}
    packages = {".".join(name.split(".")[:end]) for name in named for end in range(1, 9)}
    around = {package for package in packages if f"{own}.".startswith(f"{package}.")}
    return (named | (packages - around)) - {own}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {dotted(path): runs_first(path) for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"import cycle: {' -> '.join(cycle.args[1])}")


def test_nothing_is_unpickled() -> None:
    """`torch.load` and its like run whatever code the file holds."""
    for path in MODULES:
        assert not {"pickle", "cloudpickle", "dill", "joblib"} & set(imports(path)), inside(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert ast.unparse(node) not in ("torch.load", "np.load", "numpy.load"), inside(
                    path
                )
            if isinstance(node, ast.keyword):
                assert node.arg not in ("allow_pickle", "trust_remote_code"), inside(path)


def test_no_file_has_grown_too_long() -> None:
    lengths = {
        path.relative_to(REPOSITORY).as_posix(): len(path.read_text("utf-8").splitlines())
        for folder in (PACKAGE, REPOSITORY / "tests")
        for path in folder.rglob("*.py")
    }

    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}
