"""A corpus and a coordinator for the runs of a test module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoint.settings import write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs lie, beside a corpus."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "corpus").mkdir()
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture
def coordinators() -> Iterator[Callable[[], str]]:
    """Gives the address of a new coordinator at every call: one that has seen an earlier launch
    waits some seconds for its clusters to come back."""
    from dsx.exchange.coordinator import Coordinator

    with ExitStack() as running:
        yield lambda: running.enter_context(Coordinator("127.0.0.1:0")).address
