"""wandb without a key or a network: offline at once, below the run's folder, never a prompt."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.tracking import wandb as tracking_wandb

SCRIPT = """
import json, sys, time
from dsx.settings.dsx_block import TrackingSettings
from dsx.tracking.tracker import Tracker
from tests.tracking.runs import cluster_events

started = time.monotonic()
tracker = Tracker.open(sys.argv[1], "c0", "tiny", TrackingSettings())
for event in cluster_events("c0"):
    tracker.log(event)
tracker.close()
print(json.dumps({"where": tracker.wandb_location, "seconds": time.monotonic() - started}))
"""

REPOSITORY = Path(__file__).parents[2]


def clean_environment(home: Path, **extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    return kept | {"HOME": str(home), "XDG_CONFIG_HOME": str(home)} | extra


def run_tracker(run_dir: Path, home: Path, **extra: str) -> dict:
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir)],
        cwd=REPOSITORY,
        env=clean_environment(home, **extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_without_a_key_the_run_is_offline_and_a_resume_keeps_its_id(tmp_path: Path):
    run_dir = tmp_path / "run"
    first = run_tracker(run_dir, tmp_path / "home")
    stored = (run_dir / "wandb" / "c0.id").read_text().strip()
    folder = Path(first["where"])
    assert folder.parent == run_dir / "wandb"
    assert list(folder.glob(f"run-{stored}.wandb"))
    second = run_tracker(run_dir, tmp_path / "home")
    assert (run_dir / "wandb" / "c0.id").read_text().strip() == stored
    assert list(Path(second["where"]).glob(f"run-{stored}.wandb"))


def test_with_a_key_but_no_server_the_run_is_offline_within_seconds(tmp_path: Path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = run_tracker(
            tmp_path / "run", tmp_path / "home", WANDB_API_KEY="k" * 40, WANDB_BASE_URL=url
        )
    assert Path(result["where"]).parent == tmp_path / "run" / "wandb"
    assert result["seconds"] < 20


def test_a_run_switched_off_by_wandb_itself_leaves_no_run(tmp_path: Path):
    result = run_tracker(tmp_path / "run", tmp_path / "home", WANDB_MODE="disabled")
    assert result["where"] is None


@pytest.fixture
def quick_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_wandb, "REACH_SECONDS", 0.3)


def test_a_name_that_never_resolves_is_given_up_after_the_limit(
    quick_limit: None, monkeypatch: pytest.MonkeyPatch
):
    released = threading.Event()

    def stuck(*_: object, **__: object) -> None:
        released.wait(30)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    started = time.monotonic()
    assert not tracking_wandb._answers("http://api.example.org")
    assert time.monotonic() - started < 5
    released.set()


def test_a_server_that_takes_a_connection_but_never_answers_is_given_up(quick_limit: None):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not tracking_wandb._answers(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_a_server_that_refuses_the_key_leaves_the_run_offline(tmp_path: Path):
    with refusing_server() as url:
        assert tracking_wandb._answers(url)
        result = run_tracker(
            tmp_path / "run", tmp_path / "home", WANDB_API_KEY="k" * 40, WANDB_BASE_URL=url
        )
    assert Path(result["where"]).parent == tmp_path / "run" / "wandb"
    assert result["seconds"] < 40


class Refuse(http.server.BaseHTTPRequestHandler):
    """401 for everything."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def refusing_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
