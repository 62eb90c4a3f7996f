"""A hub that nobody reaches: one quick error, whatever was asked for."""

from collections.abc import Iterator
from pathlib import Path

import datasets.config
import pytest
from huggingface_hub import constants

from dsx import hub
from dsx.data.corpus import find_corpus
from dsx.data.digests import FileDigests
from dsx.data.tokenizer import load_tokenizer
from dsx.errors import DataError, ModelError
from dsx.models.config import load_config
from dsx.settings.dsx_block import ModelSettings
from tests.distributed import free_port


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client believes that it may ask, and nobody listens where it would."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(hub, "getproxies", dict)
    hub.hub_is_reachable.cache_clear()
    yield
    hub.hub_is_reachable.cache_clear()


def test_a_name_that_is_nowhere_is_one_error_and_no_noise(
    unreachable: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = "in the local cache of the hub, which can't be reached from here$"
    with pytest.raises(DataError, match=f"the tokenizer 'no/such' can't be loaded: .*{where}"):
        load_tokenizer("no/such")
    with pytest.raises(DataError, match=f"the corpus 'no/such' is neither .*{where}"):
        find_corpus("no/such", "text", tmp_path).digest(FileDigests(tmp_path / "memo.json"))
    with pytest.raises(ModelError, match=f"'no/such': it is no folder, and not {where[:-1]}"):
        load_config(ModelSettings(path="no/such"))
    assert "".join(capfd.readouterr()) == ""


def test_who_answers_is_asked(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_answers", lambda url: url == constants.ENDPOINT)
    assert hub.hub_is_reachable()
    assert not constants.HF_HUB_OFFLINE
