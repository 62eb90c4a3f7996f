"""A stand-in for the `deepspeed` command: one child ("rank") that acts as the test tells it.

`behaviour` maps a cluster's name to what its rank does. Each rank leaves its process id in
`pids/CLUSTER` once it is up, as does the helper that it starts in a session of its own.
"""

import json
import sys
from pathlib import Path

import psutil

SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path({folder!r})
arguments = sys.argv[1:]
cluster = arguments[arguments.index("--cluster") + 1]
behaviour = json.loads((folder / "behaviour.json").read_text())[cluster]

def note(name):
    (folder / "pids").mkdir(exist_ok=True)
    draft = folder / "pids" / ("." + name)
    draft.write_text(str(os.getpid()))
    draft.rename(folder / "pids" / name)

def forever():
    while True:
        time.sleep(60)

role = os.environ.get("FAKE_ROLE", "command")
if role == "helper":
    note(cluster + "-helper")
    forever()
if role == "rank":
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    again = [sys.executable, __file__, *arguments]
    if behaviour == "slow":
        # Saves a while after it was asked to end, and has no helper of its own for long.
        def save(*_):
            time.sleep(1)
            (folder / "saved").touch()
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note(cluster + "-helper")
        note(cluster)
        forever()
    if behaviour in ("forever", "stubborn", "orphan"):
        subprocess.Popen(again, env={{**os.environ, "FAKE_ROLE": "helper"}}, start_new_session=True)
    note(cluster)
    if behaviour in ("forever", "stubborn", "orphan"):
        forever()
    if behaviour == "succeed":
        print("[dsx] phase: done", flush=True)
        sys.exit(0)
    # Fails as {{"after": other ranks that must be up, "print": text, "code": exit code}}.
    while not all((folder / "pids" / name).exists() for name in behaviour["after"]):
        time.sleep(0.01)
    print(behaviour["print"], flush=True)
    sys.exit(behaviour["code"])
(folder / (cluster + ".json")).write_text(
    json.dumps({{"arguments": arguments, "environment": dict(os.environ)}})
)
rank = subprocess.Popen(
    [sys.executable, __file__, *arguments],
    env={{**os.environ, "FAKE_ROLE": "rank", "LOCAL_RANK": "0"}},
)
if behaviour == "orphan":
    while not (folder / "pids" / (cluster + "-helper")).exists():
        time.sleep(0.01)
    sys.exit(0)
sys.exit(rank.wait())
"""


class FakeDeepSpeed:
    """The command, and what its clusters did."""

    def __init__(self, folder: Path, behaviour: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        self.folder = folder
        self.command = folder / "deepspeed"
        self.command.write_text(f"#!{sys.executable} -IS\n" + SCRIPT.format(folder=str(folder)))
        self.command.chmod(0o755)

    def call(self, cluster: str) -> dict:
        """`arguments` and `environment` that a cluster's command was started with."""
        return json.loads((self.folder / f"{cluster}.json").read_text())

    def pids(self) -> dict[str, int]:
        """Process ids of the ranks and helpers that have been up."""
        noted = (self.folder / "pids").glob("[!.]*")
        return {path.name: int(path.read_text()) for path in noted}

    def alive(self) -> list[str]:
        """Ranks and helpers that still run."""
        return [name for name, pid in self.pids().items() if runs(pid)]


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
