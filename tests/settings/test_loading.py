"""Reading a settings file and overriding parts of it."""

import json
from pathlib import Path

import pytest

from dsx.errors import SettingsError
from dsx.settings import load_settings, parse_settings
from dsx.settings.dsx_block import TrainTokenizer
from tests.settings.files import changed, valid, written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, valid())


def test_an_override_replaces_a_value_of_the_file(path: Path) -> None:
    settings = load_settings(path, ["dsx.outer.local_steps=10", "optimizer.params.lr=0.5"])

    assert settings.dsx.outer.local_steps == 10
    assert settings.deepspeed_config()["optimizer"]["params"]["lr"] == 0.5


def test_an_override_adds_a_block_that_the_file_leaves_out(path: Path) -> None:
    assert load_settings(path, ["dsx.checkpoint.keep=7"]).dsx.checkpoint.keep == 7


def test_the_last_of_two_overrides_of_a_key_wins(path: Path) -> None:
    assert load_settings(path, ["dsx.seed=1", "dsx.seed=2"]).dsx.seed == 2


def test_override_values_are_json_where_they_are_json(path: Path) -> None:
    settings = load_settings(
        path,
        [
            "dsx.pipeline.partition=[1, 3]",
            'dsx.tokenizer={"vocab_size": 300}',
            "dsx.tracking.wandb=false",
            "dsx.outer.delay=round",
            'dsx.outer.own_share="mean"',
            "bf16.enabled=false",
        ],
    )

    assert settings.dsx.pipeline.partition == [1, 3]
    assert settings.dsx.tokenizer == TrainTokenizer(vocab_size=300)
    assert settings.dsx.tracking.wandb is False
    assert settings.dsx.outer.delay == "round"
    assert settings.dsx.outer.own_share == "mean"
    assert settings.bf16.enabled is False


def test_a_text_that_looks_like_json_stays_a_text_where_only_a_text_fits(path: Path) -> None:
    settings = load_settings(path, ["dsx.name=2024", "dsx.tracking.entity=true", "dsx.run_dir=a=b"])

    assert settings.dsx.name == "2024"
    assert settings.dsx.tracking.entity == "true"
    assert settings.dsx.run_dir == "a=b"


def test_null_unsets_a_value_so_that_a_path_can_replace_a_config(path: Path) -> None:
    model = load_settings(path, ["dsx.model.config=null", "dsx.model.path=facebook/opt-125m"])

    assert model.dsx.model.config is None
    assert model.dsx.model.path == "facebook/opt-125m"


def test_an_override_reaches_into_the_models_own_config(path: Path) -> None:
    settings = load_settings(path, ["dsx.model.config.hidden_size=96"])

    assert settings.dsx.model.config == {"model_type": "llama", "hidden_size": 96}


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("dsx.outer.local_step=10", "did you mean dsx.outer.local_steps?"),
        ("dsx.outr.local_steps=10", "dsx.outr: is unknown; did you mean dsx.outer?"),
        ("outer.local_steps=10", "outer: is unknown here; it belongs under dsx (dsx.outer)"),
        ("local_steps=10", "belongs under dsx.outer (dsx.outer.local_steps)"),
        ("dsx.outer.local_steps=0", "dsx.outer.local_steps: is 0; it must be at least 1"),
        ("dsx.outer.local_steps=ten", 'is "ten"; expected an integer'),
        ("dsx.outer.local_steps", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("dsx..seed=3", "expected KEY=VALUE"),
        ("dsx.tokenizer.vocab_size=512", "--set 'dsx.tokenizer=JSON'"),
    ],
)
def test_a_bad_override_is_refused_with_advice(path: Path, override: str, advice: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_settings(path, [override])

    assert advice in str(refusal.value)


def test_an_error_names_the_override_that_it_comes_of_and_else_the_file(path: Path) -> None:
    with pytest.raises(SettingsError) as one:
        load_settings(path, ["dsx.seed=3", "dsx.outer.local_steps=0"])
    assert str(one.value).startswith("--set dsx.outer.local_steps=0: dsx.outer.local_steps: is 0")

    path.write_text(json.dumps(changed(**{"dsx.seed": -1})))
    with pytest.raises(SettingsError) as both:
        load_settings(path, ['dsx.outer={"local_steps": 0}'])
    head, *lines = str(both.value).splitlines()
    assert head == f"{path}: 2 problems"
    origin = ' (--set dsx.outer={"local_steps": 0})'
    assert {line.split(":")[0].strip(): line.endswith(origin) for line in lines} == {
        "dsx.seed": False,
        "dsx.outer.local_steps": True,
    }


def test_a_byte_order_mark_does_no_harm(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert load_settings(path).dsx.name == "tiny"


def test_parsed_json_is_checked_like_a_file() -> None:
    assert parse_settings(valid()).dsx.training.steps == 100
    with pytest.raises(SettingsError, match=r"^here: dsx.outer.start_clusters: "):
        parse_settings(changed(**{"dsx.outer.min_clusters": 9}), source="here")


def test_settings_cannot_be_changed_after_they_were_checked(path: Path) -> None:
    settings = load_settings(path)

    with pytest.raises(ValueError, match="frozen"):
        settings.dsx.outer.local_steps = 3  # type: ignore[misc]


def test_a_run_without_steps_may_keep_its_warm_up(path: Path) -> None:
    assert load_settings(path, ["dsx.training.steps=0"]).dsx.training.schedule.warmup_steps == 10
