"""HF tokenizers: load, train, save and apply. The only place in `dsx.data` with transformers."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dsx.data.digests import text_digest
from dsx.errors import DataError
from dsx.hub import hub_is_reachable, where_names_are_looked_up

EOS = "<|endoftext|>"
# A byte-level vocabulary can't be smaller than the 256 bytes and EOS.
SMALLEST_VOCABULARY = 257
# GPT-2's cut into words, numbers, other signs and blanks, changed to suit source code: one sign may
# lead a word (`.join`, `_name`), a number is cut every three digits, and signs at a line's end take
# the line break and the next line's indent along. On the standard library 5 to 6 % more bytes per
# token than GPT-2's own cut.
WORDS = (
    r"[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?:[ \t]+(?!\S))?)?|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; id 0 is EOS, and any text can be encoded and decoded back.

    Args:
        texts: the documents.
        vocab_size: entries of the vocabulary, EOS and the 256 bytes included.

    Raises:
        DataError: `vocab_size` is below 257, or the texts have fewer different pieces than that.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small; it holds 256 bytes and EOS, "
            f"so ask for at least {SMALLEST_VOCABULARY}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    if backend.get_vocab_size() < vocab_size:
        raise DataError(
            f"the corpus yields only {backend.get_vocab_size()} vocabulary entries, fewer than the "
            f"vocab_size of {vocab_size} asked for; lower it or give more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def load_tokenizer(name_or_folder: str) -> PreTrainedTokenizerBase:
    """Load an HF tokenizer by name (from the hub or its cache) or from a folder.

    Raises:
        DataError: there is no such tokenizer, or it has no EOS token inside its vocabulary.
    """
    is_folder = Path(name_or_folder).is_dir()
    offline = not is_folder and not hub_is_reachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = (
            "the folder holds no HF tokenizer that can be read"
            if is_folder
            else f"{Path.cwd()} has no such folder, and there is none {where_names_are_looked_up()}"
        )
        # Of a hub that nobody reached, the library's own words say nothing more.
        detail = "" if offline else f" ({type(error).__name__}: {error})"
        raise DataError(
            f"the tokenizer {name_or_folder!r} can't be loaded: {what}{detail}"
        ) from error
    eos_id(tokenizer, name_or_folder)
    return tokenizer


def eos_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The id that ends a document.

    Raises:
        DataError: the tokenizer names no EOS token, or one beyond its vocabulary.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            f"the tokenizer {name!r} has no EOS token, which must end every document; set "
            "`eos_token` in its tokenizer_config.json"
        )
    if not 0 <= eos < len(tokenizer):
        raise DataError(
            f"the tokenizer {name!r} has EOS id {eos}, beyond its vocabulary of {len(tokenizer)}; "
            "its tokenizer.json lacks the token that its config names"
        )
    return int(eos)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer as an HF folder that `AutoTokenizer.from_pretrained` loads."""
    # Where this copy was loaded from is nobody else's business.
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(str(folder))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        # transformers 5's name of the class, which transformers 4 can't look up; both know this.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of how the tokenizer encodes and ends documents, wherever it was loaded from."""
    with tempfile.TemporaryDirectory() as copy:
        # Its config names versions and the like, and nothing that the other files lack but EOS.
        tokenizer.save_pretrained(copy)
        files = sorted(path for path in Path(copy).iterdir() if path.stem != "tokenizer_config")
        parts = [part for path in files for part in (path.name, path.read_text(errors="replace"))]
    return text_digest("tokenizer", str(tokenizer.eos_token_id), *parts)


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], name: str
) -> list[list[int]]:
    """Token ids of every text, each ended by one EOS.

    The spelling of a special token inside a text is encoded as ordinary text, so EOS occurs only
    where a document ends. Nothing is truncated, and no BOS is added.

    Raises:
        DataError: an id is beyond the tokenizer's vocabulary.
    """
    eos = eos_id(tokenizer, name)
    encoded: list[list[int]] = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    largest = max((max(ids, default=0) for ids in encoded), default=0)
    if largest >= len(tokenizer):
        raise DataError(
            f"the tokenizer {name!r} gives the token id {largest}, but its vocabulary has only "
            f"{len(tokenizer)} entries; its files don't belong together"
        )
    return [[*ids, eos] for ids in encoded]
