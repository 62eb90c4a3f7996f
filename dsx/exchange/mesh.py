"""WireGuard configurations: an encrypted network that only the machines of a run are in."""

import base64
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dsx.errors import LaunchError, SettingsError
from dsx.exchange.secret import RunSecret

INTERFACE = "dsx0"
"""The network's name on every machine, and of the file that `wg-quick` reads."""
SECRET = "run-secret"
COMMANDS = "commands.txt"
COORDINATOR_PORT = 29510
_KEEPALIVE_SECONDS = 25
"""Keeps the way through a NAT open."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class Machine:
    """One machine of one cluster."""

    cluster: str
    number: int
    """In its cluster, from 0, which is where the cluster's rank 0 runs."""
    folder: str
    host: str
    port: int
    """Where the others reach its WireGuard (UDP)."""


def parse_clusters(words: Sequence[str]) -> list[Machine]:
    """`NAME=HOST:PORT[,HOST:PORT...]` of every cluster.

    Raises:
        SettingsError: a word has another form, a name or an address comes twice, or there is only
            one machine.
    """
    machines: list[Machine] = []
    for word in words:
        name, equals, places = word.partition("=")
        if not equals or _NAME.fullmatch(name) is None:
            raise _unusable(word)
        found = places.split(",")
        for number, place in enumerate(found):
            host, colon, port = place.rpartition(":")
            inner = host.removeprefix("[").removesuffix("]")
            if (
                not colon
                or _HOST.fullmatch(inner) is None
                or (":" in host) != host.startswith("[")
                or not port.isdecimal()
                or not 0 < int(port) < 2**16
            ):
                raise _unusable(word)
            folder = name if len(found) == 1 else f"{name}-{number}"
            machines.append(Machine(name, number, folder, host, int(port)))
    for what in ({m.folder for m in machines}, {(m.host, m.port) for m in machines}):
        if len(what) < len(machines):
            raise SettingsError(
                f"--clusters {' '.join(words)}: a name or an address comes twice; give each "
                "machine its own"
            )
    if len(machines) < 2:
        raise SettingsError(
            "--clusters names one machine, which needs no network; name all of them"
        )
    return machines


def write_mesh(
    machines: Sequence[Machine], network: str, coordinator: str, folder: str | Path
) -> list[Path]:
    """A folder for every machine: its WireGuard configuration, the run secret, and what to type.

    Args:
        network: whose addresses the machines get, for example 10.83.0.0/24.
        coordinator: the cluster on whose first machine the coordinator is to run.
        folder: to be made; everything in it is for its owner alone.

    Raises:
        SettingsError: the network or the coordinator can't be.
        LaunchError: `folder` is there and not empty.
    """
    addresses = _addresses(network, len(machines))
    try:
        hub = next(i for i, m in enumerate(machines) if m.cluster == coordinator and not m.number)
    except StopIteration:
        raise SettingsError(
            f"--coordinator is {coordinator}, which is none of the clusters "
            f"({', '.join(dict.fromkeys(m.cluster for m in machines))}); name one of them"
        ) from None
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise LaunchError(
            f"{root} is there already, and may hold the keys of a network that is in use; choose "
            "another folder, or remove it"
        )
    keys = [X25519PrivateKey.generate() for _ in machines]
    clusters = sum(machine.number == 0 for machine in machines)
    length = ipaddress.ip_network(network).prefixlen
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    RunSecret.create(root / SECRET)
    secret = (root / SECRET).read_text(encoding="utf-8")
    (root / SECRET).unlink()
    written = []
    for own, machine in enumerate(machines):
        place = root / machine.folder
        place.mkdir(mode=0o700)
        config = [
            "[Interface]",
            f"# {machine.folder}",
            f"PrivateKey = {_base64(keys[own].private_bytes_raw())}",
            f"Address = {addresses[own]}/{length}",
            f"ListenPort = {machine.port}",
        ]
        for other, peer in enumerate(machines):
            if other != own:
                config += [
                    "",
                    "[Peer]",
                    f"# {peer.folder}",
                    f"PublicKey = {_base64(keys[other].public_key().public_bytes_raw())}",
                    f"AllowedIPs = {addresses[other]}/32",
                    f"Endpoint = {peer.host}:{peer.port}",
                    f"PersistentKeepalive = {_KEEPALIVE_SECONDS}",
                ]
        _write(place / f"{INTERFACE}.conf", "\n".join([*config, ""]))
        _write(place / SECRET, secret)
        lines = _commands(machine, addresses[own], addresses[hub], own == hub, clusters)
        _write(place / COMMANDS, "\n".join([*lines, ""]))
        written.append(place)
    return written


def _commands(machine: Machine, own: str, hub: str, is_hub: bool, clusters: int) -> Iterator[str]:
    """What to type on a machine, in the folder that was written for it."""
    yield f"# {machine.folder}: once, as root"
    yield f"cp {INTERFACE}.conf /etc/wireguard/ && wg-quick up {INTERFACE}"
    if is_hub:
        yield ""
        yield "# the meeting point of all clusters"
        yield f"dsx coordinator --bind {hub}:{COORDINATOR_PORT} --secret-file {SECRET}"
    if machine.number == 0:
        yield ""
        yield "# this cluster: put these arguments behind"
        yield "# `deepspeed --num_gpus N --module dsx.train --deepspeed_config FILE`,"
        yield "# with a path to the secret that is the same on all machines of the cluster;"
        yield "# the last one waits for the other clusters before the first step"
        yield (
            f"--cluster {machine.cluster} --coordinator http://{hub}:{COORDINATOR_PORT} "
            f"--address {own} --secret-file {SECRET} --set dsx.outer.start_clusters={clusters}"
        )


def _addresses(network: str, count: int) -> list[str]:
    try:
        found = ipaddress.ip_network(network)
    except ValueError as error:
        raise SettingsError(
            f"--network is {network}: {error}; give one like 10.83.0.0/24"
        ) from error
    if found.version != 4 or not found.is_private or found.is_loopback:
        raise SettingsError(
            f"--network is {network}, which is no private IPv4 network; use one like 10.83.0.0/24"
        )
    if found.num_addresses - 2 < count:
        raise SettingsError(
            f"--network is {network}, which has no {count} addresses for {count} machines; use a "
            "larger one, like 10.83.0.0/24"
        )
    hosts = found.hosts()
    return [str(next(hosts)) for _ in range(count)]


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _base64(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _unusable(word: str) -> SettingsError:
    return SettingsError(
        f"--clusters {word}: expected NAME=HOST:PORT, as in site-a=203.0.113.5:51820, or "
        "NAME=HOST:PORT,HOST:PORT for a cluster of several machines, that of rank 0 first; names "
        "have letters, digits, ., - and _, ports are from 1 to 65535"
    )
