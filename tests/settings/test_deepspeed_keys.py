"""DeepSpeed's own keys: what reaches DeepSpeed, and that none it knows is passed over."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.settings import parse_settings
from dsx.settings.base import Block
from dsx.settings.deepspeed_keys import Bf16, DataTypes, DeepSpeedSettings, ZeroOptimization
from tests.settings.files import REMOVED, changed, valid


def test_deepspeed_gets_every_value_explicitly_and_nothing_of_dsx() -> None:
    config = parse_settings(valid()).deepspeed_config()

    assert "dsx" not in config
    assert config["gradient_clipping"] == 1.0
    assert config["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert config["zero_optimization"]["stage"] == 1
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["optimizer"] == {
        "type": "AdamW",
        "params": {
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "torch_adam": True,
        },
    }


def test_zero_stage_1_and_fp32_are_what_missing_blocks_mean() -> None:
    config = parse_settings(
        changed(**{"zero_optimization": REMOVED, "bf16": REMOVED})
    ).deepspeed_config()

    assert config["zero_optimization"]["stage"] == 1
    assert config["bf16"] == {"enabled": False}


def test_keys_left_unset_do_not_reach_deepspeed() -> None:
    config = parse_settings(valid()).deepspeed_config()

    assert not {"train_batch_size", "steps_per_print", "log_level", "comms_logger"} & set(config)


def test_torchs_sgd_is_allowed_under_zero() -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
    config = parse_settings(changed(optimizer=sgd)).deepspeed_config()

    assert config["zero_allow_untested_optimizer"] is True
    assert config["optimizer"]["params"] == {**sgd["params"], "weight_decay": 0.0}


def test_bucket_sizes_may_be_written_as_deepspeeds_users_do() -> None:
    raw = changed(**{"zero_optimization.reduce_bucket_size": 5e7})

    value = parse_settings(raw).zero_optimization.reduce_bucket_size

    assert value == 50_000_000
    assert type(value) is int


def _source(module: str) -> ast.Module:
    """The parsed source of a DeepSpeed module; importing it would take seconds."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / module).read_text(encoding="utf-8"))


def _fields_of_class(module: str, name: str) -> set[str]:
    """Keys of a DeepSpeed config class: its annotated fields, by alias where they have one."""
    (body,) = [
        node.body
        for node in _source(module).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    keys = set()
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            keys.add(node.target.id)
            call = node.value if isinstance(node.value, ast.Call) else None
            for argument in call.keywords if call else []:
                if argument.arg == "alias" and isinstance(argument.value, ast.Constant):
                    keys.add(argument.value.value)
    return keys


def _string_constants(module: str) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in _source(module).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _known_keys(block: type[Block]) -> set[str]:
    return set(block.model_fields) | set(block.unsupported)


@pytest.mark.parametrize(
    ("module", "name", "block"),
    [
        ("runtime/zero/config.py", "DeepSpeedZeroConfig", ZeroOptimization),
        ("runtime/precision_config.py", "DeepSpeedBF16Config", Bf16),
    ],
)
def test_every_key_of_deepspeeds_blocks_is_modelled_or_refused(
    module: str, name: str, block: type[Block]
) -> None:
    assert _fields_of_class(module, name) - _known_keys(block) == set()


def _top_level_keys() -> Iterator[str]:
    """Keys that DeepSpeed's `config.py` looks up in the whole dictionary."""
    constants = _string_constants("runtime/constants.py") | _string_constants("runtime/config.py")
    for node in ast.walk(_source("runtime/config.py")):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_scalar_param":
            holder, key = node.args[:2]
            if isinstance(holder, ast.Name) and isinstance(key, ast.Name):
                yield constants.get(key.id, "")
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Name)
            and isinstance(node.ops[0], ast.In)
            and ast.unparse(node.comparators[0]) in ("param_dict", "param_dict.keys()")
        ):
            yield constants.get(node.left.id, "")


def test_every_top_level_key_of_deepspeed_is_modelled_or_refused() -> None:
    keys = {key for key in _top_level_keys() if key}

    # That the search finds what is surely there keeps the next assertion from being empty.
    assert {"gradient_clipping", "steps_per_print", "optimizer", "torch_autocast"} <= keys
    assert keys - _known_keys(DeepSpeedSettings) == set()


def test_every_format_of_deepspeeds_data_types_is_modelled_or_refused() -> None:
    constants = _string_constants("runtime/constants.py")
    names = ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES")

    assert {constants[name] for name in names} == _known_keys(DataTypes)


def test_no_key_is_both_modelled_and_refused() -> None:
    for block in (DeepSpeedSettings, ZeroOptimization, Bf16, DataTypes):
        assert not set(block.model_fields) & set(block.unsupported)
