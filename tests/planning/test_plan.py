"""A whole plan for a small model: what fits, what is chosen, what is refused and why."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsx.cli.main import main
from dsx.errors import PlanError, SettingsError
from dsx.planning.hardware import GPUS, read_gpu
from dsx.planning.plan import Plan, Planner, Request
from dsx.planning.report import tables
from dsx.planning.time import Link
from dsx.settings import Settings, load_settings
from dsx.settings.dsx_block import OuterSettings
from dsx.settings.loading import parse_settings, read_json
from dsx.training.preflight import preflight

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.json"
GPU = read_gpu("memory=8gb,tflops=1")


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    raw = read_json(CONFIG)
    raw["gradient_accumulation_steps"] = 8
    raw["bf16"] = {"enabled": True}
    return raw


@pytest.fixture(scope="module")
def planner(raw: dict[str, Any]) -> Planner:
    return Planner(parse_settings(raw))


@pytest.fixture(scope="module")
def request_(raw: dict[str, Any]) -> Request:
    return Request(parse_settings(raw), clusters=2, gpus=4, gpu=GPU, link=Link(1e9, 0.0))


def with_outer(raw: dict[str, Any], **outer: object) -> Settings:
    return parse_settings({**raw, "dsx": {**raw["dsx"], "outer": outer}})


def test_a_faster_link_never_trains_fewer_tokens_in_rounds_of_the_same_length(
    planner: Planner, request_: Request, raw: dict[str, Any]
) -> None:
    settings = with_outer(raw, adapt={"local_steps": "fixed"})
    asked = replace(request_, settings=settings, as_set=True)
    plans = [planner.plan(replace(asked, link=Link(rate, 0.01))) for rate in (1e6, 1e7, 1e9)]
    for method in range(4):
        speeds = [plan.methods[method].tokens_per_second for plan in plans]
        assert speeds == sorted(speeds), plans[0].methods[method].method
    assert plans[0].speedup("allreduce") > plans[2].speedup("allreduce") > 0.9


def test_a_slower_link_gets_rounds_of_which_the_exchange_takes_a_fifth(
    planner: Planner, request_: Request
) -> None:
    asked = replace(request_, as_set=True)
    slow, fast = (planner.plan(replace(asked, link=Link(rate, 0.01))).outer for rate in (1e6, 1e9))
    assert fast.settings.local_steps == request_.settings.dsx.outer.local_steps
    step = (slow.time.seconds - slow.time.stalled) / slow.settings.local_steps
    assert slow.settings.local_steps == math.ceil(5 * slow.exchange_seconds / step) > 10
    assert slow.hides


def test_every_choice_hides_behind_the_inner_steps(planner: Planner, request_: Request) -> None:
    for rate in (1e6, 1e7, 1e8):
        plan = planner.plan(replace(request_, link=Link(rate, 0.05)))
        steps = plan.outer.time.delay * plan.chosen.step.seconds
        assert plan.outer.exchange_seconds <= steps
        assert plan.dsx.utilization > 0.95


def test_more_micro_batches_shrink_the_bubble_and_recomputing_shrinks_memory(
    planner: Planner, request_: Request
) -> None:
    def at(**changes: Any) -> Plan:
        settings = request_.settings
        pipeline = settings.dsx.pipeline.model_copy(
            update={"activation_checkpointing": changes.pop("recompute", False)}
        )
        dsx = settings.dsx.model_copy(update={"pipeline": pipeline})
        settings = settings.model_copy(update={"dsx": dsx, **changes})
        return planner.plan(replace(request_, settings=settings, as_set=True))

    few, many = at(gradient_accumulation_steps=2), at(gradient_accumulation_steps=32)
    assert few.chosen.bubble_share() == pytest.approx(1 / 3)
    assert many.chosen.bubble_share() == pytest.approx(1 / 33)
    kept, again = at(), at(recompute=True)
    assert again.chosen.device_bytes < kept.chosen.device_bytes
    assert again.chosen.step.seconds > kept.chosen.step.seconds


def test_a_measured_step_sets_the_speed(planner: Planner, request_: Request) -> None:
    slow = planner.plan(replace(request_, step_seconds=2.0, as_set=True))
    assert slow.chosen.step.seconds == pytest.approx(2.0)
    with pytest.raises(SettingsError, match="check the value and --gpu"):
        planner.plan(replace(request_, step_seconds=1e-9))


def test_what_does_not_fit_is_told_with_the_stage_and_the_ways_out(
    planner: Planner, request_: Request
) -> None:
    small = replace(GPU, memory=1.53e9)
    with pytest.raises(PlanError, match=r"on stage \d .*take \d+ GPUs per cluster .*or GPUs of "):
        planner.plan(replace(request_, gpus=2, gpu=small))
    with pytest.raises(PlanError, match="host_memory"):
        planner.plan(replace(request_, gpu=replace(GPU, host_memory=1e6)))
    odd = request_.settings.model_copy(update={"train_batch_size": 7})
    with pytest.raises(PlanError, match="multiple of 16"):
        planner.plan(replace(request_, settings=odd, gpus=16))
    with pytest.raises(PlanError, match=r"no round of up to 500 .*find a link of a higher rate"):
        planner.plan(replace(request_, link=Link(100.0, 0.0)))
    with pytest.raises(PlanError, match=r"no round of up to 500 .*find a link of less latency"):
        planner.plan(replace(request_, link=Link(1e9, 1e5)))


def test_what_an_exchange_takes_at_the_fewest_bits_is_not_that_of_the_own_codec(
    planner: Planner, request_: Request
) -> None:
    dense = {"matrices": "fp16", "embeddings": "fp16"}
    outer = OuterSettings.model_validate({"own_residual": "none", "compression": dense})
    dsx = request_.settings.dsx.model_copy(update={"outer": outer})
    settings = request_.settings.model_copy(update={"dsx": dsx})
    with pytest.raises(PlanError) as refused:
        planner.plan(replace(request_, settings=settings, link=Link(100.0, 0.0)))
    found = re.search(r"fewest bits \(([0-9.]+) MB", str(refused.value))
    assert found is not None
    own = planner.plan(replace(request_, settings=settings, as_set=True)).outer.traffic.bytes
    assert float(found[1]) * 1e6 < own / 20


def test_the_gpu_that_is_advised_is_large_enough(planner: Planner, request_: Request) -> None:
    with pytest.raises(PlanError) as refused:
        planner.plan(replace(request_, gpus=2, gpu=replace(GPU, memory=1.53e9)))
    found = re.search(r"or GPUs of ([0-9.]+ [GM]B) ", str(refused.value))
    assert found is not None
    memory = float(found[1].split()[0]) * (1e9 if found[1].endswith("GB") else 1e6)
    planner.plan(replace(request_, gpus=2, gpu=replace(GPU, memory=memory)))


def test_the_number_of_gpus_that_is_advised_fits_with_the_layout_that_is_named(
    planner: Planner, request_: Request
) -> None:
    small = replace(request_, gpus=1, gpu=replace(GPU, memory=1.53e9))
    with pytest.raises(PlanError) as refused:
        planner.plan(small)
    found = re.search(r"take (\d+) GPUs per cluster \((\d+) stages x", str(refused.value))
    assert found is not None
    gpus, stages = map(int, found.groups())
    batch = request_.settings.model_copy(update={"train_batch_size": 8})
    for count in range(1, gpus):
        with pytest.raises(PlanError):
            planner.layout(replace(small, settings=batch, gpus=count))
    fits = planner.layout(replace(small, settings=batch, gpus=gpus))
    assert fits.layout.stages <= gpus
    assert stages > 1


def test_a_layout_as_set_that_does_not_fit_is_told_with_the_one_that_does(
    planner: Planner, request_: Request
) -> None:
    small = replace(GPU, memory=1.55e9)
    with pytest.raises(PlanError, match=r"take the layout without --as-set \(\d+ stages x"):
        planner.plan(replace(request_, gpu=small, as_set=True))


def test_what_does_not_fit_ends_the_command_as_an_error_not_as_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--deepspeed_config", str(CONFIG), "--gpus-per-cluster", "1"]
    assert main([*words, "--link", "1gbit", "--gpu", "memory=1.53gb,tflops=1"]) == 1
    assert "dsx: no layout fits" in capsys.readouterr().err


def test_the_written_file_is_what_a_run_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "plans" / "planned.json"
    text = tmp_path / "text.jsonl"
    documents = [{"text": f"def f{i}(x): return x + {i}\n" * 40} for i in range(50)]
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    own = {"source": text, "cache_dir": tmp_path / "cache"}
    sets = [f"dsx.run_dir={tmp_path / 'run'}", *(f"dsx.data.{k}={v}" for k, v in own.items())]
    words = ["plan", "--deepspeed_config", str(CONFIG), "--clusters", "2", "--link", "2mbit"]
    words += ["--gpus-per-cluster", "2", "--gpu", "memory=2gb,tflops=1", "--write", str(written)]
    words += ["--set", *sets]
    assert main([*words, "--json", "--tokens", "1b", "--price", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)

    settings = load_settings(written)
    assert preflight(settings, 2, check_split=False).replicas == shown["layout"]["replicas"]
    assert settings.train_batch_size == 4
    assert settings.dsx.outer.local_steps == shown["rows"][0]["local_steps"]
    assert [row["method"] for row in shown["rows"]] == [
        "dsx",
        "allreduce",
        "opendiloco",
        "dilocox",
    ]
    for row in shown["rows"]:
        assert row["cost"] == pytest.approx(row["days"] * 24 * 2 * 4)

    assert main(words) == 1
    assert "name another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a100", "a100-40g"),
        ("memory=8gb", "'tflops' is missing"),
        ("memory=8gb,tflops=1,cores=3", "unknown key 'cores'"),
        ("memory=8,tflops=1", "40gb"),
        ("memory=8gb,tflops=fast", "plain numbers"),
        ("nothing.json", "no JSON object"),
    ],
)
def test_a_wrong_gpu_is_told(text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        read_gpu(text)


def test_a_gpu_can_be_described_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"memory": "80gb", "tflops": 312, "per_node": 4}))
    gpu = read_gpu(str(file))
    assert (gpu.memory, gpu.tflops, gpu.per_node) == (80e9, 312, 4)
    assert GPUS["a800-40g"].memory == 40 * 2**30


NEEDED = ("--gpus-per-cluster", "2", "--gpu", "a100-80g", "--link", "1gbit")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpu", "a100-80g"], "a plan needs --gpus-per-cluster, --link, too"),
        (["--stage", "3"], "--stage 3 is of --dry-run"),
        (["--from", "x.json"], "--from x.json is of --validate"),
        (["--write", "x.json", "--validate"], "--write x.json is of a plan"),
        ([*NEEDED, "--clusters", "1"], "a plan is of 2 to 1000 clusters"),
        ([*NEEDED, "--clusters", "100000"], "a plan is of 2 to 1000 clusters"),
    ],
)
def test_arguments_that_lack_others_are_told_at_once(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--deepspeed_config", str(CONFIG), *more]) == 2
    assert said in capsys.readouterr().err


def test_the_usage_shows_as_required_what_a_plan_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    lines = capsys.readouterr().out.splitlines()
    usage = lines[0].removeprefix("usage: dsx plan ").partition(" [")[0]
    options = [word for word in usage.split() if word.startswith("--")]
    assert options == ["--deepspeed_config", "--gpus-per-cluster", "--gpu", "--link"]
    needed = lines[lines.index("needed for a plan:") + 1 :]
    assert {line.split()[0] for line in needed[: needed.index("")]} >= set(options[1:])


@pytest.mark.parametrize("price", ["-3", "0", "nan", "dear"])
def test_a_price_is_above_zero(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--deepspeed_config", str(CONFIG), f"--price={price}"])
    assert ended.value.code == 2
    assert f"is {price}; give a price above 0" in capsys.readouterr().err


def test_a_round_that_is_too_long_to_be_of_use_is_told_in_words(
    planner: Planner, request_: Request
) -> None:
    slow = planner.plan(replace(request_, as_set=True, link=Link(2e4, 0.0)))
    assert slow.outer.expected_kept < 0
    console = Console(width=400)
    with console.capture() as shown:
        console.print(tables(slow, None, None))
    assert "NO BETTER THAN ONE CLUSTER ALONE" in shown.get()
