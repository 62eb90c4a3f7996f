"""Where documents come from: files, globs, the hub or the standard library, through `datasets`.

A text file is one document. A `.jsonl`/`.ndjson`/`.json` file has one JSON object per line, a
`.parquet` file one row per document; `text_field` names the column. Anything else is UTF-8 text.
"""

import glob
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from dsx.data import stdlib
from dsx.data.digests import FileDigests, text_digest
from dsx.errors import DataError
from dsx.hub import hub_is_reachable, where_names_are_looked_up

JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET_SUFFIX = ".parquet"
# NAME, OWNER/NAME, either with :CONFIG.
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?")
_FILE_SUFFIXES = JSON_SUFFIXES | {PARQUET_SUFFIX, ".txt", ".text", ".md", ".py", ".gz", ".zst"}
_READ_ROWS = 256


@dataclass(frozen=True)
class FileCorpus:
    """Documents in local files, in the order of the files."""

    files: tuple[Path, ...]
    text_field: str

    def digest(self, digests: FileDigests) -> str:
        """Digest of the files' contents, formats and order; not of their names or places."""
        parts = [part for file in self.files for part in (_kind(file), digests.of(file))]
        return text_digest("files", *parts)

    def documents(self, scratch: Path) -> datasets.Dataset:
        """A `datasets.Dataset` with the column `text`; its cache is put into `scratch`.

        Raises:
            DataError: a file can't be read as what its suffix says.
        """
        features = datasets.Features({"text": datasets.Value("large_string")})
        if next(_documents_of_files(self.files, self.text_field), None) is None:
            # `from_generator` fails on a generator that yields nothing.
            return datasets.Dataset.from_dict({"text": []}, features=features)
        try:
            return datasets.Dataset.from_generator(
                _documents_of_files,
                gen_kwargs={"files": self.files, "text_field": self.text_field},
                features=features,
                # A folder of its own: `datasets` would look for an older result in a shared one, by
                # a fingerprint of the paths that knows nothing of the contents.
                cache_dir=tempfile.mkdtemp(dir=scratch),
                fingerprint=text_digest("documents")[:16],
            )
        except datasets.exceptions.DatasetGenerationError as error:
            if isinstance(error.__cause__, DataError):
                raise error.__cause__ from None
            raise


@dataclass(frozen=True)
class HubCorpus:
    """The `train` split of a data set on the hub (or in its local cache, without a network)."""

    name: str
    config: str | None
    text_field: str
    cache: Path

    def _load(self) -> datasets.Dataset:
        offline = not hub_is_reachable()
        try:
            return datasets.load_dataset(
                self.name, self.config, split="train", cache_dir=str(self.cache)
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            detail = "" if offline else f" ({type(error).__name__}: {error})"
            raise DataError(
                f"the corpus {self.name!r} is neither a local file or glob nor a data set "
                f"{where_names_are_looked_up()}{detail}"
            ) from error

    def digest(self, digests: FileDigests) -> str:
        """Digest of the data set's name, configuration and version, as `datasets` sees them."""
        return text_digest("hub", self.name, str(self.config), self._load()._fingerprint)

    def documents(self, scratch: Path) -> datasets.Dataset:
        """A `datasets.Dataset` with the column `text`, without empty documents.

        Raises:
            DataError: the data set can't be loaded or has no such column.
        """
        table = self._load()
        if self.text_field not in table.column_names:
            raise DataError(
                f"the data set {self.name!r} has no column {self.text_field!r}, only "
                f"{', '.join(table.column_names)}; set data.text_field to one of them"
            )
        table = table.select_columns([self.text_field])
        if self.text_field != "text":
            table = table.rename_column(self.text_field, "text")
        table = table.filter(
            lambda texts: [bool(text) for text in texts],
            input_columns="text",
            batched=True,
            cache_file_name=str(scratch / "filled.arrow"),
            load_from_cache_file=False,
        )
        return table.cast_column("text", datasets.Value("large_string"))


Corpus = FileCorpus | HubCorpus


def find_corpus(source: str | Sequence[str], text_field: str, cache: Path) -> Corpus:
    """Resolve `data.source` without reading any document.

    Args:
        source: `python-stdlib`; a file or glob, or a list of them; or a hub data set as `NAME` or
            `OWNER/NAME`, with `:CONFIG` where it has several.
        text_field: the column with a document's text, where documents have columns.
        cache: where `datasets` keeps what comes from the hub.

    Raises:
        DataError: nothing is found, a folder is given, or a list has anything but files.
    """
    if isinstance(source, str):
        if source == stdlib.SOURCE:
            return FileCorpus(tuple(stdlib.stdlib_files()), text_field)
        files = _find_files(source)
        if not files and not glob.has_magic(source):
            return _find_hub(source, text_field, cache)
        source = [source]
    found: dict[Path, None] = {}
    for entry in source:
        files = _find_files(entry)
        if not files:
            raise DataError(
                f"data.source {entry!r} matches no file; patterns are relative to the working "
                "folder, and a list may hold files and globs only"
            )
        found.update(dict.fromkeys(files))
    if not found:
        raise DataError("data.source is an empty list; give at least one file or glob")
    return FileCorpus(tuple(found), text_field)


def _find_files(entry: str) -> list[Path]:
    path = Path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        raise DataError(
            f"data.source {entry!r} is a folder; say which files of it, for example "
            f"{str(path / '**' / '*.txt')!r}"
        )
    return [Path(name) for name in sorted(glob.glob(entry, recursive=True)) if Path(name).is_file()]


def _find_hub(source: str, text_field: str, cache: Path) -> HubCorpus:
    match = _HUB_NAME.fullmatch(source)
    if match is None or Path(source).suffix in _FILE_SUFFIXES:
        raise DataError(
            f"data.source {source!r} does not exist (seen from {Path.cwd().name!r}); give a file, "
            f"a glob, {stdlib.SOURCE!r} or a data set's name on the hub"
        )
    return HubCorpus(match["name"], match["config"], text_field, cache)


def _kind(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return "json"
    return "parquet" if suffix == PARQUET_SUFFIX else "text"


def _documents_of_files(files: Sequence[Path], text_field: str) -> Iterator[dict[str, str]]:
    readers = {"json": _json_texts, "parquet": _parquet_texts, "text": _plain_texts}
    for file in files:
        for text in readers[_kind(file)](file, text_field):
            if text:
                yield {"text": text}


def _plain_texts(file: Path, text_field: str) -> Iterator[str]:
    # Bytes, not text mode: line ends belong to the document.
    yield _decode(file.read_bytes(), str(file))


def _json_texts(file: Path, text_field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}: not a JSON object ({error}); a {file.suffix} corpus has one object "
                    "per line"
                ) from error
            if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                raise DataError(
                    f"{where}: no text under {text_field!r}; every line must be an object with a "
                    "string there, or set data.text_field to the right key"
                )
            try:
                row[text_field].encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where}: half of a surrogate pair at character {error.start}, which no "
                    "UTF-8 text can hold; mend or drop the line"
                ) from error
            yield row[text_field]


def _parquet_texts(file: Path, text_field: str) -> Iterator[str]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if text_field not in names:
            raise DataError(
                f"{file} has no column {text_field!r}, only {', '.join(names)}; set "
                "data.text_field to one of them"
            )
        kind = table.schema_arrow.field(text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{file}: the column {text_field!r} holds {kind}, not text")
        for batch in table.iter_batches(batch_size=_READ_ROWS, columns=[text_field]):
            yield from (text or "" for text in batch.column(0).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a readable parquet file ({error})") from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); convert it, or leave "
            "it out of data.source"
        ) from error
