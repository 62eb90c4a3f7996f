"""Bad settings files: each is refused with the key, what is wrong with it, and the way out."""

from pathlib import Path
from typing import Any

import pytest

from dsx.errors import SettingsError
from dsx.settings import load_settings
from tests.settings.files import REMOVED, changed, valid, written

# (the change, the key that the message must name, what it must say about it)
BAD: list[tuple[dict[str, Any], str, str]] = [
    # keys that nobody knows, at every level, in both halves of the file
    ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean gradient_clipping?"),
    ({"train_batch": 8}, "train_batch", "did you mean train_batch_size?"),
    ({"optimiser": {}}, "optimiser", "did you mean optimizer?"),
    ({"bf16.enable": True}, "bf16.enable", "did you mean bf16.enabled?"),
    (
        {"optimizer.params.wieght_decay": 0.1},
        "optimizer.params.wieght_decay",
        "did you mean optimizer.params.weight_decay?",
    ),
    (
        {"zero_optimization.algather_bucket_size": 1},
        "zero_optimization.algather_bucket_size",
        "did you mean zero_optimization.allgather_bucket_size?",
    ),
    ({"dsx.outr": {}}, "dsx.outr", "did you mean dsx.outer?"),
    ({"dsx.outer.local_step": 5}, "dsx.outer.local_step", "did you mean dsx.outer.local_steps?"),
    (
        {"dsx.training.schedule.warmup": 5},
        "dsx.training.schedule.warmup",
        "did you mean dsx.training.schedule.warmup_steps?",
    ),
    (
        {"dsx.tokenizer": {"vocabsize": 512}},
        "dsx.tokenizer.vocabsize",
        "did you mean dsx.tokenizer.vocab_size?",
    ),
    ({"dsx.zzz": 1}, "dsx.zzz", "dsx has name, run_dir, seed"),
    (
        {"optimizer.params.momentum": 0.9},
        "optimizer.params.momentum",
        "does not go with the chosen `type`, which has lr, betas, eps",
    ),
    # keys that are right somewhere else
    ({"local_steps": 20}, "local_steps", "belongs under dsx.outer (dsx.outer.local_steps)"),
    ({"dsx.seq_len": 64}, "dsx.seq_len", "belongs under dsx.data (dsx.data.seq_len)"),
    ({"dsx.stages": 2}, "dsx.stages", "belongs under dsx.pipeline (dsx.pipeline.stages)"),
    ({"lr": 1e-3}, "lr", "belongs under optimizer.params (optimizer.params.lr)"),
    (
        {"stage3_max_live_parameters": 1},
        "stage3_max_live_parameters",
        "as zero_optimization.stage3_max_live_parameters it can't be used: it belongs to ZeRO",
    ),
    # DeepSpeed's keys that can't be used here
    ({"fp16": {"enabled": True}}, "fp16", 'use "bf16": {"enabled": true}'),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "use `dsx.training.schedule`"),
    ({"shceduler": {}}, "shceduler", "it looks like `scheduler`"),
    ({"pipeline": {"stages": 2}}, "pipeline", "use `dsx.pipeline`"),
    (
        {"activation_checkpointing": {}},
        "activation_checkpointing",
        "use `dsx.pipeline.activation_checkpointing`",
    ),
    ({"wandb": {"enabled": True}}, "wandb", "see `dsx.tracking`"),
    ({"elasticity": {}}, "elasticity", "clusters may come and go"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler", "never prints its profile"),
    (
        {"zero_optimization.offload_optimizer": {"device": "cpu"}},
        "zero_optimization.offload_optimizer",
        "fp32 master weights",
    ),
    (
        {"bf16.bf16_optimizer_states": True},
        "bf16.bf16_optimizer_states",
        "have to stay in fp32",
    ),
    (
        {"optimizer.params.max_grad_norm": 1.0},
        "optimizer.params.max_grad_norm",
        "use the top-level `gradient_clipping`",
    ),
    ({"optimizer.params.adam_w_mode": True}, "optimizer.params.adam_w_mode", "leave it out"),
    # modes that can't resume or don't work with pipelines
    ({"zero_optimization.stage": 0}, "zero_optimization.stage", "can't resume in bf16"),
    ({"zero_optimization.stage": 2}, "zero_optimization.stage", "can't be combined with pipelines"),
    ({"zero_optimization.stage": 3}, "zero_optimization.stage", "use 1"),
    ({"zero_optimization.stage": 7}, "zero_optimization.stage", "stages 0 to 3; use 1"),
    ({"zero_optimization": True}, "zero_optimization", "expected a JSON object"),
    ({"zero_optimization.overlap_comm": True}, "zero_optimization.overlap_comm", "use false"),
    ({"data_types.grad_accum_dtype": "bf16"}, "data_types.grad_accum_dtype", 'need "fp32"'),
    # what has no default
    ({"gradient_clipping": REMOVED}, "gradient_clipping", "0 turns clipping off"),
    ({"optimizer": REMOVED}, "optimizer", "required but missing"),
    ({"optimizer.type": REMOVED}, "optimizer.type", "required but missing"),
    ({"optimizer.params": {}}, "optimizer.params.lr", "required but missing"),
    ({"dsx": REMOVED}, "dsx", "required but missing"),
    ({"dsx.name": REMOVED}, "dsx.name", "required but missing"),
    ({"dsx.training.steps": REMOVED}, "dsx.training.steps", "0 only evaluates"),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
        "optimizer.params.adam_w_mode",
        "silently be AdamW",
    ),
    # values of the wrong kind
    (
        {"train_micro_batch_size_per_gpu": "auto"},
        "train_micro_batch_size_per_gpu",
        "write the value itself",
    ),
    ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps", "4 without quotes"),
    ({"gradient_accumulation_steps": 2.0}, "gradient_accumulation_steps", "(write 2)"),
    ({"dsx.seed": True}, "dsx.seed", "expected an integer"),
    ({"dsx.pipeline.stages": 1.5}, "dsx.pipeline.stages", "expected an integer"),
    ({"bf16.enabled": 1}, "bf16.enabled", "expected true or false"),
    ({"dsx.outer.lr": "fast"}, "dsx.outer.lr", "expected a number"),
    ({"dsx.outer": [1]}, "dsx.outer", "expected a JSON object"),
    ({"dsx.tokenizer": 5}, "dsx.tokenizer", 'a text in "quotes" or a JSON object'),
    ({"dsx.data.source": ["a.txt", 2]}, "dsx.data.source[1]", 'expected a text in "quotes"'),
    ({"optimizer.params.betas": [0.9]}, "optimizer.params.betas[1]", "required but missing"),
    # values outside their limits
    ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu", "greater than 0"),
    ({"gradient_clipping": -1}, "gradient_clipping", "at least 0"),
    ({"optimizer.params.lr": 0}, "optimizer.params.lr", "greater than 0"),
    ({"optimizer.params.betas": [0.9, 1.0]}, "optimizer.params.betas[1]", "less than 1"),
    ({"dsx.data.heldout_fraction": 0.5}, "dsx.data.heldout_fraction", "less than 0.5"),
    ({"dsx.tokenizer": {"vocab_size": 100}}, "dsx.tokenizer.vocab_size", "at least 257"),
    ({"dsx.training.schedule.min_ratio": 1.5}, "dsx.training.schedule.min_ratio", "at most 1"),
    ({"dsx.outer.momentum": 1}, "dsx.outer.momentum", "less than 1"),
    ({"dsx.checkpoint.keep": 0}, "dsx.checkpoint.keep", "at least 1"),
    ({"dsx.name": ""}, "dsx.name", "must not be empty"),
    ({"dsx.data.source": []}, "dsx.data.source", "must not be empty"),
    # names of something
    ({"optimizer.type": "adamw"}, "optimizer.type", 'did you mean "AdamW"?'),
    ({"optimizer.type": "OneBitAdam"}, "optimizer.type", "'AdamW', 'Adam', 'SGD'"),
    ({"dsx.training.schedule.type": "cosin"}, "dsx.training.schedule.type", '"cosine"?'),
    ({"dsx.pipeline.partition": "uniforms"}, "dsx.pipeline.partition", 'did you mean "uniform"?'),
    ({"dsx.outer.own_share": "some"}, "dsx.outer.own_share", "'none', 'all' or 'mean'"),
    ({"dsx.outer.delay": "auot"}, "dsx.outer.delay", 'did you mean "auto"?'),
    ({"communication_data_type": "fp16"}, "communication_data_type", "'fp32' or 'bf16'"),
    # settings that don't fit together
    ({"dsx.outer.delay": 21}, "dsx.outer.delay", "use 0 to 20"),
    ({"dsx.outer.delay": -1}, "dsx.outer.delay", "use 0 to 20"),
    (
        {"dsx.pipeline.partition": [1, 2, 3]},
        "dsx.pipeline.partition",
        "3 numbers of layers for 2 `stages`",
    ),
    ({"dsx.pipeline.partition": [0, 4]}, "dsx.pipeline.partition[0]", "at least 1"),
    ({"dsx.model.path": "facebook/opt-125m"}, "dsx.model.path", "--set dsx.model.config=null"),
    ({"dsx.model": {}}, "dsx.model.config", "give one of them"),
    ({"dsx.model.init": "pretrained"}, "dsx.model.init", "give `path`"),
    ({"dsx.model.config": {"hidden_size": 8}}, "dsx.model.config.model_type", "model family"),
    (
        {"dsx.training.schedule.warmup_steps": 101},
        "dsx.training.schedule.warmup_steps",
        "use at most 100",
    ),
    ({"dsx.outer.min_clusters": 2}, "dsx.outer.start_clusters", "set it to at least 2"),
    ({"train_batch_size": 12}, "train_batch_size", "use 8 (times the number of replicas)"),
    (
        {"bf16": REMOVED, "communication_data_type": "bf16"},
        "communication_data_type",
        "set bf16.enabled to true",
    ),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown", "set steps_per_print"),
    (
        {"comms_logger": {"enabled": True, "verbose": False}},
        "comms_logger.verbose",
        "set it to true",
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 1.0, "nesterov": True}}},
        "optimizer.params.nesterov",
        "set `momentum`",
    ),
    ({"optimizer.params.torch_adam": False}, "optimizer.params.torch_adam", "leave it out"),
]


@pytest.mark.parametrize(("change", "key", "advice"), BAD, ids=[f"{b[1]}-{b[2]}" for b in BAD])
def test_a_bad_file_is_refused_by_key_and_with_advice(
    tmp_path: Path, change: dict[str, Any], key: str, advice: str
) -> None:
    path = written(tmp_path, changed(**change))

    with pytest.raises(SettingsError) as refusal:
        load_settings(path)

    message = str(refusal.value)
    assert message.startswith(f"{path}: {key}: "), message
    assert advice in message, message


def test_the_unchanged_file_is_accepted(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, valid())).dsx.name == "tiny"


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        changed(**{"fp16": {}, "gradient_clipping": REMOVED, "dsx.outer.lr": 0, "dsx.sead": 1}),
    )

    with pytest.raises(SettingsError) as refusal:
        load_settings(path)

    first, *lines = str(refusal.value).splitlines()
    assert first == f"{path}: 4 problems"
    assert sorted(line.split(":")[0].strip() for line in lines) == [
        "dsx.outer.lr",
        "dsx.sead",
        "fp16",
        "gradient_clipping",
    ]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ('{\n  "train_micro_batch_size_per_gpu": 4,\n}', "line 3, column 1"),
        ('{\n  "a": 1 // one\n}', "line 2, column 10: Expecting ',' delimiter (JSON has no comm"),
        ("{'a': 1}", 'JSON quotes with "'),
        ('{"a": 1,}', "no comma after the last entry"),
        ("", "line 1, column 1"),
        ("[1, 2]", "a settings file is a JSON object"),
        (
            '{"bf16": {"enabled": true,\n "enabled": false}}',
            'the key "enabled" is written twice in one object (it is on lines 1, 2)',
        ),
        ('{"gradient_clipping": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, advice: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(SettingsError) as refusal:
        load_settings(path)

    assert str(path) in str(refusal.value)
    assert advice in str(refusal.value)


def test_a_missing_file_is_an_error_that_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no such settings file .*configs/"):
        load_settings(tmp_path / "none.json")


def test_a_folder_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SettingsError, match="can't be read"):
        load_settings(tmp_path)
    with pytest.raises(SettingsError, match="can't be read"):
        load_settings(tmp_path / "binary.json")
