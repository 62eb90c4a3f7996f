"""The settings files in configs/ and the reference in docs/."""

from pathlib import Path

import pytest
from pydantic import Field

from dsx.settings import check_layout, load_settings
from dsx.settings.base import Block
from dsx.settings.codec_block import CompressionSettings
from dsx.settings.reference import DOCUMENT, chapters, main, reference
from dsx.settings.settings import Settings
from dsx.settings.tree import blocks_at, walk

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_file_loads(path: Path) -> None:
    assert load_settings(path).dsx.name == path.stem


def test_the_promised_files_are_shipped() -> None:
    assert {path.stem for path in CONFIGS} >= {
        *("quickstart", "opt-1.3b", "llama-150m", "llama-1b", "qwen1.5-107b"),
    }


@pytest.mark.parametrize(
    ("name", "processes", "batch", "local_steps"),
    [("llama-150m", 1, 512, 500), ("llama-1b", 8, 2048, 125)],
)
def test_the_llama_files_hold_opendilocos_recipe(
    name: str, processes: int, batch: int, local_steps: int
) -> None:
    settings = load_settings(REPOSITORY / "configs" / f"{name}.json")
    config, outer = settings.deepspeed_config(), settings.dsx.outer

    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"]["lr"] == 4e-4
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert config["optimizer"]["params"]["weight_decay"] == 0.1
    assert config["gradient_clipping"] == 1.0
    assert settings.train_batch_size == batch
    assert check_layout(settings, processes) * settings.dsx.pipeline.stages == processes
    assert settings.dsx.training.schedule.model_dump() == {
        "type": "cosine",
        "warmup_steps": 1000,
        "min_ratio": 0.0,
    }
    assert settings.dsx.data.seq_len == 1024
    assert (outer.lr, outer.momentum, outer.momentum_warmup_steps) == (0.7, 0.9, 0)
    assert outer.delay == 0
    assert outer.local_steps == local_steps
    codecs = outer.compression
    kinds = (codecs.matrices, codecs.embeddings, codecs.vectors)
    assert [codec.type for codec in kinds] == ["fp16"] * 3


def test_the_reference_in_docs_is_what_the_models_say() -> None:
    written = (REPOSITORY / DOCUMENT).read_text(encoding="utf-8")

    assert written == reference(), "run: python -m dsx.settings.reference"


def test_writing_the_reference_writes_that_text(tmp_path: Path) -> None:
    main(tmp_path / "docs" / "configuration.md")

    assert (tmp_path / "docs" / "configuration.md").read_text(encoding="utf-8") == reference()


def test_every_key_is_documented_with_a_sentence() -> None:
    text = reference()
    for path in walk(Settings):
        for block in blocks_at(Settings, path[:-1]):
            field = block.model_fields.get(path[-1])
            if field is not None and path[-1] != "type":
                assert (field.description or "").endswith("."), path
        assert f"`{path[-1]}`" in text, path


def test_a_union_told_apart_by_type_is_one_table_of_its_members() -> None:
    class Outer(Block):
        compression: CompressionSettings = Field(..., description="Codecs.")

    sections = list(chapters(Outer, "dsx.outer"))

    heading = sections.index(
        "### `dsx.outer.compression.matrices`, `dsx.outer.compression.embeddings`, "
        "`dsx.outer.compression.vectors`"
    )
    table = sections[heading + 1].splitlines()
    assert any(line.startswith('| `"lowrank"` | ') and "`rank` (" in line for line in table)


def test_no_table_cell_breaks_its_table() -> None:
    for line in reference().splitlines():
        if line.startswith("|"):
            assert line.count(" | ") in (2, 3), line
