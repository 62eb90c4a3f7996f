"""The README's commands, run for real: one quickstart in a copy of the clone, and two launches."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]
STEPS, WARMUP, LOCAL_STEPS = 13, 3, 4
OVERRIDES = [
    "--set",
    f"dsx.training.steps={STEPS}",
    f"dsx.training.schedule.warmup_steps={WARMUP}",
    f"dsx.outer.local_steps={LOCAL_STEPS}",
    # Rounds are counted below; beside steps this short the link would choose longer ones.
    "dsx.outer.adapt.local_steps=fixed",
    "dsx.training.eval_every=5",
    "dsx.training.eval_batches=2",
    "dsx.checkpoint.every_rounds=2",
]
INNER = {"step", "round", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"}
OUTER = {
    "round",
    "participants",
    "bytes_sent",
    "bytes_received",
    "exchange_seconds",
    "blocked_seconds",
    "local_steps",
    "codec",
    "pseudo_gradient_norm",
    "shared_digest",
    "tokens_total",
}
PLAIN_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([tokenizer.encode("def main():")])
assert torch.isfinite(model(input_ids=ids).logits).all()
assert len(model.generate(ids, max_new_tokens=4, do_sample=False)[0]) > ids.shape[1]
assert not [name for name in sys.modules if name.split(".")[0] in ("dsx", "deepspeed")]
"""


def lines(run: Path, cluster: str, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (run / f"metrics-{cluster}.jsonl").open()]
    return [line for line in every if line["kind"] == kind]


class Quickstart:
    """A copy of the clone whose `.venv` is the environment that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "clone"
        for name in ("dsx", "configs", "launch", "tokenizer", "pyproject.toml"):
            source, target = CLONE / name, self.clone / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        (self.clone / ".venv").mkdir()
        for entry in Path(sys.prefix).iterdir():
            (self.clone / ".venv" / entry.name).symlink_to(entry)
        (self.clone / ".venv" / "installed").unlink(missing_ok=True)
        stamp = subprocess.run(
            "cat pyproject.toml launch/constraints.txt | cksum",
            shell=True,
            cwd=self.clone,
            capture_output=True,
            check=True,
        )
        (self.clone / ".venv" / "installed").write_bytes(stamp.stdout)
        self.run = self.clone / "runs" / "quickstart"
        self.first = self.call()
        self.second = self.call()

    def call(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["./launch/quickstart.sh", *OVERRIDES],
            cwd=self.clone,
            env=os.environ | {"WANDB_MODE": "offline"},
            capture_output=True,
            text=True,
            timeout=900,
        )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    return Quickstart(tmp_path_factory.mktemp("quickstart"))


@pytest.mark.multiprocess
class TestQuickstart:
    def test_it_succeeds_and_says_where_everything_is(self, quickstart: Quickstart) -> None:
        assert quickstart.first.returncode == 0, quickstart.first.stdout + quickstart.first.stderr
        printed = quickstart.first.stdout
        for part in ("held-out loss by plain transformers", "gzip -9", "run folder", "go on with"):
            assert part in printed

    def test_a_second_call_reuses_and_says_so(self, quickstart: Quickstart) -> None:
        assert quickstart.second.returncode == 0, (
            quickstart.second.stdout + quickstart.second.stderr
        )
        printed = quickstart.second.stdout
        assert "reusing the environment" in printed
        assert "reused" in printed
        assert len(lines(quickstart.run, "c0", "inner")) == STEPS

    def test_every_kind_of_line_has_its_keys(self, quickstart: Quickstart) -> None:
        for cluster in ("c0", "c1"):
            for kind, keys in (("inner", INNER), ("outer", OUTER)):
                for line in lines(quickstart.run, cluster, kind):
                    assert keys | {"kind", "cluster", "time"} <= line.keys()
            (start,) = lines(quickstart.run, cluster, "run")[:1]
            assert {"settings", "versions", "model_size", "layout"} <= start.keys()

    def test_both_clusters_hold_the_same_shared_weights_after_every_round(
        self, quickstart: Quickstart
    ) -> None:
        digests = [
            [line["shared_digest"] for line in lines(quickstart.run, cluster, "outer")]
            for cluster in ("c0", "c1")
        ]
        assert len(digests[0]) == math.ceil(STEPS / LOCAL_STEPS)
        assert len(set(digests[0])) == len(digests[0])
        assert digests[0] == digests[1]

    def test_the_clusters_train_on_different_data_with_the_same_schedule(
        self, quickstart: Quickstart
    ) -> None:
        settings = lines(quickstart.run, "c0", "run")[0]["settings"]
        peak = settings["optimizer"]["params"]["lr"]
        smallest = settings["dsx"]["training"]["schedule"]["min_ratio"]

        def cosine(step: int) -> float:
            if step < WARMUP:
                return peak * (step + 1) / WARMUP
            progress = (step - WARMUP) / (STEPS - WARMUP)
            return peak * (smallest + (1 - smallest) * (1 + math.cos(math.pi * progress)) / 2)

        first, second = (lines(quickstart.run, cluster, "inner") for cluster in ("c0", "c1"))
        for at, (one, other) in enumerate(zip(first, second, strict=True)):
            assert one["lr"] == other["lr"] == pytest.approx(cosine(at), rel=1e-12)
            assert one["loss"] != other["loss"]

    def test_the_loss_falls_and_shared_weights_are_evaluated(self, quickstart: Quickstart) -> None:
        inner = lines(quickstart.run, "c0", "inner")
        assert inner[-1]["loss"] < inner[0]["loss"] - 0.5
        evals = [lines(quickstart.run, cluster, "eval") for cluster in ("c0", "c1")]
        assert [line["weights"] for line in evals[0]] == ["shared"] * len(evals[0])
        assert evals[0][-1]["step"] == STEPS
        assert evals[0][-1]["loss"] == evals[1][-1]["loss"]

    def test_reported_bytes_are_what_the_codec_makes_of_the_model(
        self, quickstart: Quickstart
    ) -> None:
        size = lines(quickstart.run, "c0", "run")[0]["model_size"]
        for one, other in zip(
            lines(quickstart.run, "c0", "outer"), lines(quickstart.run, "c1", "outer"), strict=True
        ):
            assert one["bytes_sent"] == other["bytes_received"]
            assert one["bytes_sent"] < 4 * size / 6

    def test_no_token_was_passed_over_or_trained_twice(self, quickstart: Quickstart) -> None:
        audit = json.loads(
            subprocess.run(
                [sys.executable, "-m", "dsx.cli.main", "audit", "--json", "--run", quickstart.run],
                check=True,
                cwd=quickstart.clone,
                capture_output=True,
                text=True,
            ).stdout
        )
        trained = lines(quickstart.run, "c0", "inner")[-1]["tokens"]
        assert audit["rounds"] == math.ceil(STEPS / LOCAL_STEPS)
        for cluster in ("c0", "c1"):
            fate = audit["clusters"][cluster]
            assert fate["trained"] == fate["committed"] == trained
        assert audit["never_trained"] == audit["trained_twice"] == 0

    def test_the_export_loads_where_dsx_is_unknown(self, quickstart: Quickstart) -> None:
        subprocess.run(
            [sys.executable, "-c", PLAIN_LOAD, str(quickstart.run / "hf")],
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )

    def test_the_run_leaves_wandb_files_and_a_self_contained_report(
        self, quickstart: Quickstart
    ) -> None:
        assert len(list((quickstart.run / "wandb").rglob("run-*.wandb"))) >= 2
        page = (quickstart.run / "report.html").read_text()
        assert "<svg" in page
        assert 'src="http' not in page


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "dsx"), "coordinator", "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    yield next(word for word in line.split() if word.startswith("http://")).rstrip(".,;")
    process.terminate()
    assert process.wait(timeout=20) == 0


@pytest.mark.multiprocess
def test_two_launches_of_deepspeed_meet_at_a_coordinator(
    coordinator: str, tmp_path: Path, quickstart: Quickstart
) -> None:
    """As a module and as a script: both ways in of the README."""
    from dsx.cluster.launch import free_ports

    entries = [["--module", "dsx.train"], ["dsx/train.py"]]
    launches = [
        subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2"),
                *("--master_port", str(port), *entry),
                *("--deepspeed_config", "configs/quickstart.json", *OVERRIDES),
                *(f"dsx.run_dir={tmp_path}", "dsx.tracking.wandb=false"),
                *("dsx.outer.start_clusters=2", "dsx.outer.delay=round"),
                *("--cluster", cluster, "--coordinator", coordinator),
            ],
            cwd=quickstart.clone,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for cluster, port, entry in zip(("site-a", "site-b"), free_ports(2), entries, strict=True)
    ]
    printed = [launch.communicate(timeout=600)[0] for launch in launches]
    for launch, text in zip(launches, printed, strict=True):
        assert launch.returncode == 0, text
    digests = [
        [line["shared_digest"] for line in lines(tmp_path, cluster, "outer")]
        for cluster in ("site-a", "site-b")
    ]
    assert len(digests[0]) == math.ceil(STEPS / LOCAL_STEPS)
    assert digests[0] == digests[1]
