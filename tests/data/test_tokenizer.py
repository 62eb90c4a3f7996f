from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dsx.data.tokenizer import (
    EOS,
    WORDS,
    encode_documents,
    load_tokenizer,
    save_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)
from dsx.errors import DataError
from tests.data.conftest import document

PYTHON_4K = Path(__file__).parents[2] / "tokenizer" / "python-4k"


def word_level(vocabulary: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module")
def python_4k() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(PYTHON_4K))


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_its_tokens(python_4k: PreTrainedTokenizerBase, text: str) -> None:
    ids = encode_documents(python_4k, [text], "python-4k")[0]
    assert ids.count(python_4k.eos_token_id) == 1
    assert python_4k.decode(ids[:-1]) == text


def test_the_shipped_tokenizer_is_an_ordinary_hf_folder() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(PYTHON_4K))
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == EOS
    assert tokenizer.eos_token_id == 0
    assert tokenizer.convert_ids_to_tokens(tokenizer("    return self.name\n")["input_ids"]) == [
        "ĠĠĠ",
        "Ġreturn",
        "Ġself",
        ".name",
        "Ċ",
    ]


def test_words_are_cut_for_source_code() -> None:
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
    text = "def f(x):\n    return x.y_1 + 12345  # naïve\n\nfoo"
    pieces = [piece for piece, _ in cut.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    assert pieces == [
        "def",
        " f",
        "(x",
        "):\n   ",
        " return",
        " x",
        ".y",
        "_",
        "1",
        " +",
        " ",
        "123",
        "45",
        " ",
        " #",
        " naïve",
        "\n",
        "\n",
        "foo",
    ]


def test_training_is_deterministic_and_as_large_as_asked(tokenizer_folder: Path) -> None:
    again = train_tokenizer((document(number) for number in range(40)), 300)
    assert len(again) == 300
    assert again.eos_token_id == 0
    assert tokenizer_digest(again) == tokenizer_digest(load_tokenizer(str(tokenizer_folder)))
    other = train_tokenizer((document(number) for number in range(40)), 301)
    assert tokenizer_digest(again) != tokenizer_digest(other)


def test_saving_what_was_loaded_gives_the_same_files(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    save_tokenizer(load_tokenizer(str(tokenizer_folder)), tmp_path / "copy")
    files = sorted(path.name for path in tokenizer_folder.iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "copy" / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_eos_in_a_text_is_text_and_ends_nothing(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    texts = [f"a{EOS}b", "", "c"]
    encoded = encode_documents(tokenizer, texts, "small")
    assert [ids.count(0) for ids in encoded] == [1, 1, 1]
    assert [ids[-1] for ids in encoded] == [0, 0, 0]
    assert [tokenizer.decode(ids[:-1]) for ids in encoded] == texts


def test_a_vocabulary_too_small_or_too_large_for_the_corpus_is_refused() -> None:
    with pytest.raises(DataError, match=r"256 is too small.*at least 257"):
        train_tokenizer(["text"], 256)
    with pytest.raises(DataError, match=r"yields only 2.. vocabulary entries.*400"):
        train_tokenizer(["abc abc"], 400)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, why in (("empty", "the folder holds no"), ("no/such", ".* has no such folder, and")):
        with pytest.raises(DataError, match=f"the tokenizer '{name}' can't be loaded: {why}"):
            load_tokenizer(name)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    word_level({"a": 0, "b": 1}).save_pretrained(str(tmp_path / "no-eos"))
    with pytest.raises(DataError, match="'no-eos' has no EOS token"):
        load_tokenizer("no-eos")


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    gap = word_level({"a": 0, "<eos>": 1, "b": 500}, eos_token="<eos>")
    assert encode_documents(gap, ["a a"], "gap") == [[0, 0, 1]]
    with pytest.raises(DataError, match=r"'gap' gives the token id 500.* only 3 entries"):
        encode_documents(gap, ["a b"], "gap")
    late = word_level({"a": 0, "<eos>": 7}, eos_token="<eos>")
    with pytest.raises(DataError, match="EOS id 7, beyond its vocabulary of 2"):
        encode_documents(late, ["a"], "late")
