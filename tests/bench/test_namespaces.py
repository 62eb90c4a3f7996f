"""The slow link itself: it shapes, it counts, and nothing of it is left behind."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dsx.bench import namespaces
from dsx.bench.namespaces import SlowLink, network_rights
from dsx.errors import LaunchError

RATE = 4e6
PAYLOAD = 500_000
PORT = 5000

SEND = f"""
import subprocess, sys, time
from dsx.bench.namespaces import SlowLink

RECEIVE = '''
import socket, time
with socket.create_server(("{{address}}", {PORT})) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, size = time.monotonic(), 0
    while piece := connection.recv(65536):
        size += len(piece)
    print(size, time.monotonic() - began, flush=True)
'''
SEND = '''
import socket
with socket.create_connection(("{{address}}", {PORT})) as connection:
    connection.sendall(bytes({PAYLOAD}))
'''

def python(program):
    return [sys.executable, "-c", program.format(address=address)]

for rate in ({RATE}, None):
    with SlowLink(2, rate) as link:
        address = link.address(1)
        receiver = subprocess.Popen(
            [*link.inside(1), *python(RECEIVE)], stdout=subprocess.PIPE, text=True
        )
        receiver.stdout.readline()
        subprocess.run([*link.inside(0), *python(SEND)], check=True)
        size, seconds = receiver.communicate()[0].split()
        one, other = link.counted()
        print(size, seconds, one.sent, other.received, other.sent)
"""

HOLD = """
import subprocess, sys
from dsx.bench.namespaces import SlowLink
link = SlowLink(2, 1e6)
inside = subprocess.Popen(
    [*link.inside(0), "sleep", "600"], env=link.environment | {"PATH": "/usr/bin:/bin"}
)
print(inside.pid, link.environment["DSX_LINK_OWNER"], flush=True)
sys.stdin.read()
"""

OPEN_AND_LIST = """
import subprocess
from dsx.bench.namespaces import SlowLink
with SlowLink(1):
    print(subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout)
"""


def with_rights(program: str) -> list[str]:
    return [*network_rights(), sys.executable, "-c", program]


def test_a_payload_takes_as_long_as_the_rate_says_and_is_counted_at_both_ends() -> None:
    done = subprocess.run(with_rights(SEND), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shaped, free = ([float(word) for word in line.split()] for line in done.stdout.splitlines())

    for size, _, sent, received, acknowledged in (shaped, free):
        assert size == PAYLOAD
        assert PAYLOAD < sent < 1.15 * PAYLOAD
        assert received == pytest.approx(sent, rel=0.02)
        assert 0 < acknowledged < 0.2 * sent
    # A bucket that is full at the start lets a few packets through at once.
    assert shaped[1] > 0.9 * 8 * PAYLOAD / RATE
    assert free[1] < shaped[1] / 2


def test_a_killed_owner_leaves_nothing_once_the_next_link_is_opened() -> None:
    with holding() as owner:
        assert owner.stdout is not None
        pid, mark = owner.stdout.readline().split()
        inside = psutil.Process(int(pid))
        owner.kill()
        owner.wait()
        assert inside.is_running()

        listed = subprocess.run(with_rights(OPEN_AND_LIST), capture_output=True, text=True)

    assert listed.returncode == 0, listed.stderr
    assert mark not in listed.stdout
    assert not inside.is_running() or inside.status() == psutil.STATUS_ZOMBIE


def test_a_link_whose_owner_lives_is_left_alone() -> None:
    with holding() as owner:
        assert owner.stdout is not None
        pid, _ = owner.stdout.readline().split()
        inside = psutil.Process(int(pid))

        subprocess.run(with_rights(OPEN_AND_LIST), check=True, capture_output=True)

        assert inside.status() != psutil.STATUS_ZOMBIE


@contextmanager
def holding() -> Iterator[subprocess.Popen[str]]:
    """A process that has opened a link, with a process inside."""
    owner = subprocess.Popen(
        with_rights(HOLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield owner
    finally:
        owner.kill()
        owner.wait()
        subprocess.run(with_rights(OPEN_AND_LIST), check=True, capture_output=True)


def test_the_systems_tools_are_found_where_the_path_lacks_their_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(namespaces._tool("tc")).is_absolute()
    assert namespaces._tool("no-such-tool") == "no-such-tool"


def test_more_clusters_than_the_kernel_has_room_for_are_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel_owned = Path("/proc/sys/kernel/ngroups_max")  # A number that root can't change either.
    monkeypatch.setattr(namespaces, "_NEIGHBOURS", kernel_owned)
    limit = int(kernel_owned.read_text())
    clusters = math.isqrt(limit)

    with pytest.raises(LaunchError) as refusal:
        SlowLink(clusters)
    needed = 2 * (clusters + 1) ** 2
    assert f"need {needed} neighbours, and {kernel_owned} is {limit}" in str(refusal.value)
    assert f"gc_thresh3={needed}" in str(refusal.value)


def test_a_kernel_limit_that_can_not_be_raised_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A number of the kernel's that not even root may write.
    fixed = Path("/proc/sys/kernel/random/entropy_avail")
    monkeypatch.setattr(namespaces, "_NEIGHBOURS", fixed)
    known = int(fixed.read_text())
    with pytest.raises(LaunchError, match=f"{known + 100_000} neighbours.*gc_thresh3=.*fewer"):
        namespaces._allow_neighbours(known + 100_000)
    namespaces._allow_neighbours(known // 2)
