"""A slow link between clusters of one machine: network namespaces, and a token bucket in each way.

Every cluster gets a namespace whose only way out is the interface `slow0`. All of these lead to a
bridge in a namespace between them, the hub, where the coordinator runs. What a cluster sends and
what it receives each pass a token bucket (`tc qdisc tbf`), like a site's line to the internet;
inside a cluster nothing is shaped. The bytes that are counted are those of the interfaces, with
all headers.

Names hold the process that made them. A killed process leaves its namespaces and what runs in them
behind: whoever opens the next link removes both.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from dsx.errors import LaunchError

INTERFACE = "slow0"
"""Of each cluster, towards the others."""
OWNER = "DSX_LINK_OWNER"
"""Environment variable of all that runs on a link: the process that opened it."""
_CLONE_NEWNET = 0x40000000
_PREFIX = "dsx-link-"
_NETWORK = "10.83"
_QUEUE_SECONDS = 0.2
_LEAST_QUEUE = 10 * 1514
_LEAST_BURST = 3 * 1514
_TICK_SECONDS = 0.004
"""Between two looks of the kernel's packet scheduler, at the least frequent: a bucket has to hold
what the rate gives in this time."""

_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
"""Most neighbours that the kernel keeps, those of all namespaces together."""


def _tool(name: str) -> str:
    """Where it is: a user's PATH may lack the folders of the system's tools."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=path) or name


_IP, _TC = _tool("ip"), _tool("tc")


@dataclass(frozen=True)
class Counted:
    """Bytes that a cluster's interface has carried since the link was opened."""

    sent: int
    received: int


class SlowLink:
    """Namespaces for `clusters` clusters; a context manager. Needs root, or `network_rights`.

    Args:
        clusters: up to 250.
        rate: bits per second and direction of every cluster's line; None does not shape.

    Raises:
        LaunchError: namespaces can't be made here.
    """

    def __init__(self, clusters: int, rate: float | None = None) -> None:
        self._clusters = clusters
        self._owner = f"{os.getpid()}-{_started(os.getpid())}"
        remove_stale()
        _allow_neighbours(2 * (clusters + 1) ** 2)
        try:
            self._hub = self._add_namespace("hub")
            _ip("-n", self._hub, "link", "add", "hub", "type", "bridge")
            _ip("-n", self._hub, "addr", "add", f"{self.hub_address}/16", "dev", "hub")
            _ip("-n", self._hub, "link", "set", "hub", "up")
            for cluster in range(clusters):
                self._connect(cluster)
            self._observer = self._observe()
            self.shape(rate)
        except BaseException:
            self.close()
            raise

    @property
    def hub_address(self) -> str:
        """Where the coordinator listens."""
        return f"{_NETWORK}.255.1"

    @property
    def environment(self) -> dict[str, str]:
        """What every process on the link needs in its environment, so that none is left behind."""
        return {OWNER: self._owner}

    def address(self, cluster: int) -> str:
        """Of a cluster's interface."""
        return f"{_NETWORK}.0.{cluster + 1}"

    def inside(self, cluster: int | None) -> tuple[str, ...]:
        """Words before a command that is to run in a cluster's place (None: at the hub)."""
        return (_IP, "netns", "exec", self._hub if cluster is None else self._name(str(cluster)))

    def enter(self, cluster: int | None) -> None:
        """Move this thread, and all that it starts, to a cluster's place (None: the hub).

        Call it before the process has opened a socket or started a thread.
        """
        name = self._hub if cluster is None else self._name(str(cluster))
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise LaunchError(f"can't enter {name}: {os.strerror(ctypes.get_errno())}")

    def shape(self, rate: float | None, only: int | None = None) -> None:
        """Another rate from now on, in bits per second; None does not shape.

        Args:
            only: the cluster whose line it is; all by default.
        """
        for cluster in range(self._clusters) if only is None else [only]:
            for place, interface in (
                (self._name(str(cluster)), INTERFACE),
                (self._hub, _port(cluster)),
            ):
                if rate is None:
                    _run(_TC, "-n", place, "qdisc", "del", "dev", interface, "root", check=False)
                else:
                    bucket = _bucket(rate)
                    _run(_TC, "-n", place, "qdisc", "replace", "dev", interface, "root", *bucket)

    def cut(self, cluster: int) -> None:
        """Nothing passes a cluster's line any more, and nobody is told."""
        _ip("-n", self._hub, "link", "set", _port(cluster), "nomaster")

    def mend(self, cluster: int) -> None:
        """What was cut carries again."""
        _ip("-n", self._hub, "link", "set", _port(cluster), "master", "hub")

    def counted(self) -> list[Counted]:
        """By cluster."""
        lines = Path(f"/proc/{self._observer.pid}/net/dev").read_text().splitlines()
        columns = {
            words[0].strip(): words[1].split() for line in lines if (words := line.split(":"))[1:]
        }
        ports = [columns[_port(cluster)] for cluster in range(self._clusters)]
        # What the hub's end has received, the cluster has sent.
        return [Counted(sent=int(port[0]), received=int(port[8])) for port in ports]

    def close(self) -> None:
        """Remove the namespaces; whatever still runs in them ends."""
        _remove(self._owner)

    def __enter__(self) -> "SlowLink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _name(self, place: str) -> str:
        return f"{_PREFIX}{self._owner}-{place}"

    def _observe(self) -> subprocess.Popen[bytes]:
        """A process at the hub: looking at the counters through it costs nearly nothing."""
        process = subprocess.Popen(
            [*self.inside(None), "sh", "-c", "echo there && exec sleep infinity"],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        return process

    def _add_namespace(self, place: str) -> str:
        name = self._name(place)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _connect(self, cluster: int) -> None:
        name = self._add_namespace(str(cluster))
        port = _port(cluster)
        peer = ("peer", "name", INTERFACE, "netns", name)
        _ip("-n", self._hub, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._hub, "link", "set", port, "master", "hub")
        _ip("-n", self._hub, "link", "set", port, "up")
        _ip("-n", name, "addr", "add", f"{self.address(cluster)}/16", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")


def network_rights() -> tuple[str, ...]:
    """Words before a command that makes a `SlowLink`: none for root, others get a user namespace.

    Raises:
        LaunchError: neither is to be had on this machine.
    """
    if os.geteuid() == 0:
        return ()
    # Names of namespaces are kept under /run, which only root may write to outside.
    own = ("unshare", "--user", "--map-root-user", "--net", "--mount")
    words = (*own, "sh", "-c", 'mount -t tmpfs run /run && exec "$@"', "sh")
    try:
        tried = subprocess.run([*words, _IP, "netns"], capture_output=True, text=True)
    except OSError as error:
        raise LaunchError(f"{error.filename} is missing; install util-linux") from error
    if tried.returncode:
        raise LaunchError(
            "a slow link between clusters of one machine needs root, or unprivileged user "
            f"namespaces, which this machine refuses ({tried.stderr.strip()}); run the command as "
            "root, or allow them (sysctl kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns)"
        )
    return words


def remove_stale() -> None:
    """Remove the namespaces, and end the processes in them, of links whose owner is gone."""
    owners = {_owner_of(name) for name in _namespaces()}
    owners |= {owner for process in psutil.process_iter() if (owner := _marked(process))}
    for owner in owners:
        pid, _, started = owner.partition("-")
        if not pid.isdigit() or _started(int(pid)) != started:
            _remove(owner)


def _remove(owner: str) -> None:
    """SIGKILL: what is to end in peace has ended before."""
    left = [process for process in psutil.process_iter() if _marked(process) == owner]
    for process in left:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=10)
    for name in _namespaces():
        if _owner_of(name) == owner:
            _run(_IP, "netns", "del", name, check=False)


def _namespaces() -> list[str]:
    words = [line.split()[0] for line in _ip("netns").splitlines() if line.strip()]
    return [word for word in words if word.startswith(_PREFIX)]


def _owner_of(name: str) -> str:
    return name.removeprefix(_PREFIX).rpartition("-")[0]


def _marked(process: psutil.Process) -> str | None:
    try:
        owner = process.environ().get(OWNER)
    except (psutil.Error, OSError):
        return None
    return str(owner) if owner else None


def _started(pid: int) -> str | None:
    """What tells a process from a later one of the same number."""
    try:
        return str(round(100 * psutil.Process(pid).create_time()))
    except psutil.Error:
        return None


def _port(cluster: int) -> str:
    """The hub's end of a cluster's line."""
    return f"c{cluster}"


def _bucket(rate: float) -> list[str]:
    burst = max(_LEAST_BURST, rate / 8 * _TICK_SECONDS)
    queue = max(_LEAST_QUEUE, rate / 8 * _QUEUE_SECONDS)
    bits = f"{rate:.0f}bit"
    return ["tbf", "rate", bits, "burst", f"{burst:.0f}b", "limit", f"{burst + queue:.0f}b"]


def _ip(*words: str) -> str:
    return _run(_IP, *words)


def _run(*words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise LaunchError(f"{words[0]} can't be run ({error}); install iproute2") from error
    if check and done.returncode:
        raise LaunchError(
            f"`{' '.join(words)}` failed ({done.stderr.strip()}); a slow link between clusters of "
            "one machine needs root and a kernel with network namespaces, veth, bridge and tbf"
        )
    return done.stdout


def _allow_neighbours(count: int) -> None:
    """Every cluster has all others for neighbours: beyond the kernel's limit, connections fail.

    The limit is raised and stays so: it takes no memory until it is reached. Raises LaunchError.
    """
    limit = int(_NEIGHBOURS.read_text()) if _NEIGHBOURS.exists() else count
    if limit >= count:
        return
    try:
        _NEIGHBOURS.write_text(str(count))
    except OSError as error:
        raise LaunchError(
            f"so many clusters need {count} neighbours, and {_NEIGHBOURS} is {limit}: {error}; as "
            f"root, `sysctl -w net.ipv4.neigh.default.gc_thresh3={count}`, or take fewer clusters"
        ) from None
