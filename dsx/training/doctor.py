"""What of this machine and this set-up a run would stumble over."""

import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dsx import __version__
from dsx.cluster.launch import deepspeed_command, usable_cores, visible_gpus
from dsx.data.corpus import HubCorpus, find_corpus
from dsx.errors import DsxError, SettingsError
from dsx.exchange.address import read_coordinator
from dsx.exchange.secret import RunSecret, require_secret
from dsx.settings import Settings
from dsx.settings.dsx_block import TrainTokenizer
from dsx.tracking.text import count_text
from dsx.training.meeting import wait_for

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "torchft", "cryptography", "wandb")
ALL_INTERFACES = {"0.0.0.0", "::"}
_REACH_SECONDS = 5.0
_LAUNCHER_PORT = 29500


@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    check: str
    found: str
    wrong: bool = False
    fix: str = ""
    """What to do about it; "" where nothing is wrong."""
    unusable: bool = False
    """The settings or an argument are what is wrong, whatever the machine."""

    @classmethod
    def of_error(cls, check: str, error: DsxError, fix: str | None = None) -> "Row":
        """`fix`: None where the error says what to do behind its first semicolon."""
        found, advice = str(error), fix
        if advice is None:
            found, _, advice = found.partition("; ")
        return cls(check, found, True, advice, isinstance(error, SettingsError))

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def examine(
    settings: Settings | None, secret_file: str | None, coordinator: str | None, cluster: str
) -> Iterator[Row]:
    """Look at everything; with `settings`, also at what they name."""
    yield from _software()
    yield from _devices()
    yield from _tracking(settings)
    secret, row = _secret(secret_file)
    yield row
    if coordinator is not None:
        yield _guarded("coordinator", lambda: _coordinator(coordinator, secret, cluster))
    yield from _network()
    yield from _listeners()
    if settings is not None:
        yield from _data(settings)


def _guarded(check: str, look: Callable[[], str]) -> Row:
    """What `look` found; its errors say what to do behind their first semicolon."""
    try:
        return Row(check, look())
    except DsxError as error:
        return Row.of_error(check, error)


def _software() -> Iterator[Row]:
    yield Row("dsx", f"{__version__} on Python {platform.python_version()}")
    for name in PACKAGES:
        try:
            yield Row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Row(name, "not installed", True, f"pip install {name}, or dsx again")
    yield _guarded("deepspeed command", lambda: str(deepspeed_command()))
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    yield Row("C++ compiler", compiler or "none (only torch.compile on a CPU needs one)")


def _devices() -> Iterator[Row]:
    memory = psutil.virtual_memory()
    yield Row(
        "processor", f"{usable_cores()} cores, {memory.available / 2**30:.1f} GiB of memory free"
    )

    def gpus() -> str:
        found = visible_gpus()
        if found:
            return f"{len(found)} ({', '.join(map(str, found))})"
        return "none: all ranks use the CPU"

    yield _guarded("GPUs", gpus)


def _tracking(settings: Settings | None) -> Iterator[Row]:
    if settings is not None and not settings.dsx.tracking.wandb:
        yield Row("wandb mode", "off (dsx.tracking.wandb)")
        return
    mode = os.environ.get("WANDB_MODE", "online where there are a key and a network, else offline")
    known = mode in ("online", "offline", "disabled", "shared") or "WANDB_MODE" not in os.environ
    fix = "" if known else "unset WANDB_MODE, or set it to online, offline or disabled"
    yield Row("wandb mode", mode, not known, fix)


def _secret(path: str | None) -> tuple[RunSecret | None, Row]:
    if path is None:
        return None, Row("run secret", "none: clusters can meet on loopback addresses only")
    try:
        secret = RunSecret.read(path)
    except DsxError as error:
        found, _, advice = str(error).rpartition(": ")
        return None, Row("run secret", found, True, advice)
    return secret, Row("run secret", f"{path}, readable by its owner alone")


def _coordinator(url: str, secret: RunSecret | None, cluster: str) -> str:
    address = read_coordinator(url)
    require_secret(secret, address[0], "--coordinator")
    wait_for(address, _REACH_SECONDS, secret, cluster)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        try:
            socket.create_connection(address, _REACH_SECONDS).close()
        except OSError:
            continue
        seconds.append(time.perf_counter() - began)
    if not seconds:
        return f"{url} answers, but not every time"
    return f"{url} lets this cluster in; a connection takes {1000 * min(seconds):.2f} ms"


def _network() -> Iterator[Row]:
    name, known = os.environ.get("GLOO_SOCKET_IFNAME"), psutil.net_if_addrs()
    if name is None:
        yield Row("GLOO_SOCKET_IFNAME", "not set: loopback for a cluster on one machine")
    elif name in known:
        yield Row("GLOO_SOCKET_IFNAME", name)
    else:
        fix = f"set it to one of {', '.join(known)}, or unset it"
        yield Row("GLOO_SOCKET_IFNAME", f"{name}: no such interface", True, fix)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _LAUNCHER_PORT))
            found = "free"
        except OSError:
            found = "taken: another launch on this machine needs a --master_port of its own"
    yield Row(f"port {_LAUNCHER_PORT}", found)


def _listeners() -> Iterator[Row]:
    """Every socket on which a process of dsx or DeepSpeed of this user listens."""
    # By number: in a container the user often has no name, or another than USER says.
    own = os.getuid()
    none = True
    for process in psutil.process_iter(["uids", "cmdline"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        if uids is None or uids.real != own or not _is_ours(words):
            continue
        try:
            sockets = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        for listening in sockets:
            if listening.status != psutil.CONN_LISTEN:
                continue
            none = False
            wide = listening.laddr.ip in ALL_INTERFACES
            yield Row(
                "listening",
                f"{listening.laddr.ip}:{listening.laddr.port}, process {process.pid} "
                f"({_what(words)})",
                wide,
                "every network of this machine reaches it; bind it to one address, or close the "
                "port with a firewall"
                if wide
                else "",
            )
    if none:
        yield Row("listening", "nothing of dsx or DeepSpeed")


def _is_ours(words: list[str]) -> bool:
    return any(
        Path(word).name in ("dsx", "deepspeed") or word.startswith(("dsx.", "deepspeed."))
        for word in words[:6]
    )


def _what(words: list[str]) -> str:
    return next(
        (
            " ".join([Path(word).name, *words[at + 1 : at + 2]])
            for at, word in enumerate(words)
            if Path(word).name in ("dsx", "deepspeed") or word.startswith(("dsx.", "deepspeed."))
        ),
        "?",
    )


def _data(settings: Settings) -> Iterator[Row]:
    # It imports transformers, for which a look at the machine alone need not wait.
    from dsx.training.preflight import plan_model, require_writable

    dsx = settings.dsx
    yield Row("settings", f"{dsx.name}: sound")

    def model() -> str:
        plan, stages = plan_model(settings)
        return (
            f"{count_text(plan.parameter_counts().total)} parameters, {plan.layer_count} layers "
            f"in {len(stages)} stages"
        )

    yield _guarded("model", model)
    cache = Path(dsx.data.cache_dir)

    def corpus() -> str:
        found = find_corpus(dsx.data.source, dsx.data.text_field, cache / "hub")
        if isinstance(found, HubCorpus):
            return f"{dsx.data.source}, from the hub or its copy in {found.cache}"
        return f"{dsx.data.source}, {len(found.files)} files on this machine"

    yield _guarded("corpus", corpus)
    if isinstance(dsx.tokenizer, TrainTokenizer):
        yield Row("tokenizer", f"to be trained, {dsx.tokenizer.vocab_size} entries")
    elif Path(dsx.tokenizer).is_dir():
        yield Row("tokenizer", f"{dsx.tokenizer}, on this machine")
    else:
        yield _hub_tokenizer(dsx.tokenizer)

    def run_folder() -> str:
        require_writable(dsx.run_dir)
        return f"{dsx.run_dir}, {_free_gib(Path(dsx.run_dir)):.0f} GiB free"

    yield _guarded("run folder", run_folder)


def _hub_tokenizer(name: str) -> Row:
    from huggingface_hub import try_to_load_from_cache

    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return Row("tokenizer", f"{name}, in the cache of this machine")
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    return Row(
        "tokenizer",
        f"{name}, not on this machine",
        offline,
        "unset HF_HUB_OFFLINE for `dsx prepare`, or name a folder in dsx.tokenizer"
        if offline
        else "",
    )


def _free_gib(path: Path) -> float:
    while not path.exists():
        path = path.absolute().parent
    return shutil.disk_usage(path).free / 2**30
