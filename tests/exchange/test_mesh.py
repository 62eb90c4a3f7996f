"""The files of `dsx mesh init`: sound, matching each other, and nobody else's to read."""

import configparser
import ipaddress
import stat
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dsx import train
from dsx.cli import main
from dsx.exchange.secret import RunSecret

WORDS = ["a=203.0.113.5:51820", "b=site-b.example:51821", "big=[2001:db8::1]:1,198.51.100.7:2"]
FOLDERS = ["a", "b", "big-0", "big-1"]


def init(folder: Path, *words: str) -> int:
    return main.main(["mesh", "init", "--output", str(folder), *words])


@pytest.fixture
def mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert init(tmp_path / "mesh", "--clusters", *WORDS, "--coordinator", "b") == 0
    assert all(str(tmp_path / "mesh" / folder) in capsys.readouterr().out for folder in FOLDERS[:1])
    return tmp_path / "mesh"


def read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """[Interface], and all [Peer]s, of a WireGuard configuration."""
    sections: list[dict[str, str]] = []
    for block in path.read_text().split("\n\n"):
        parser = configparser.ConfigParser(delimiters=["="])
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(block)
        (name,) = parser.sections()
        assert name == ("Peer" if sections else "Interface")
        sections.append(dict(parser[name]))
    return sections[0], sections[1:]


def test_every_machine_knows_every_other_by_its_key_address_and_endpoint(mesh: Path) -> None:
    configs = {folder: read(mesh / folder / "dsx0.conf") for folder in FOLDERS}
    endpoints = [place for word in WORDS for place in word.partition("=")[2].split(",")]
    seen: dict[str, Any] = {}
    for folder, endpoint in zip(FOLDERS, endpoints, strict=True):
        own, _ = configs[folder]
        key = X25519PrivateKey.from_private_bytes(b64decode(own["PrivateKey"]))
        address = ipaddress.ip_interface(own["Address"])
        assert address.network == ipaddress.ip_network("10.83.0.0/24")
        assert own["ListenPort"] == endpoint.rpartition(":")[2]
        seen[folder] = (key.public_key().public_bytes_raw(), f"{address.ip}/32", endpoint)
    assert len({key for key, _, _ in seen.values()}) == len(FOLDERS)
    assert len({address for _, address, _ in seen.values()}) == len(FOLDERS)
    for folder, (_, peers) in configs.items():
        assert [
            (b64decode(peer["PublicKey"]), peer["AllowedIPs"], peer["Endpoint"]) for peer in peers
        ] == [known for name, known in seen.items() if name != folder]


def test_nobody_else_can_read_anything_and_all_have_one_secret(mesh: Path) -> None:
    for path in [mesh, *mesh.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    keys = {RunSecret.read(mesh / folder / "run-secret").key("test") for folder in FOLDERS}
    assert len(keys) == 1
    assert sorted(path.name for path in mesh.iterdir()) == FOLDERS


def test_the_commands_fit_the_addresses(mesh: Path) -> None:
    for folder in FOLDERS:
        lines = (mesh / folder / "commands.txt").read_text().splitlines()
        arguments = [line for line in lines if line.startswith("--cluster")]
        coordinators = [line for line in lines if line.startswith("dsx coordinator")]
        assert len(coordinators) == (folder == "b")
        assert len(arguments) == (folder != "big-1")
        for line in coordinators:
            parsed = main._parser("coordinator").parse_args(line.split()[1:])
            assert parsed.bind == "10.83.0.2:29510"
        for line in arguments:
            own, _ = read(mesh / folder / "dsx0.conf")
            parsed = train.parse(["--deepspeed_config", "f", *line.split()])
            assert parsed.cluster == folder.partition("-")[0]
            assert parsed.address == own["Address"].partition("/")[0]
            assert parsed.coordinator == "http://10.83.0.2:29510"
            assert parsed.secret_file == "run-secret"
            assert parsed.overrides == ["dsx.outer.start_clusters=3"]


def test_a_folder_with_something_in_it_is_never_written_to(
    mesh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in mesh.rglob("*") if path.is_file()}
    assert init(mesh, "--clusters", *WORDS) == 1
    assert "is there already" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in mesh.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "b=h:1"], "--clusters a: expected NAME=HOST:PORT"),
        (["a=h", "b=h:1"], "expected NAME=HOST:PORT"),
        (["a=h:0", "b=h:1"], "expected NAME=HOST:PORT"),
        (["a=h:70000", "b=h:1"], "expected NAME=HOST:PORT"),
        (["../a=h:2", "b=h:1"], "expected NAME=HOST:PORT"),
        (["a=h\nPostUp = x:2", "b=h:1"], "expected NAME=HOST:PORT"),
        (["a=::1:2", "b=h:1"], "expected NAME=HOST:PORT"),
        (["a=h:1", "a=h:2"], "comes twice"),
        (["a=h:1", "b=h:1"], "comes twice"),
        (["a-0=h:1", "a=h:2,h:3"], "comes twice"),
        (["a=h:1"], "names one machine"),
        (["a=h:1", "b=h:2", "--coordinator", "c"], "none of the clusters"),
        (["a=h:1", "b=h:2", "--network", "10.0.0.0/31"], "has no 2 addresses"),
        (["a=h:1", "b=h:2", "--network", "8.8.8.0/24"], "no private IPv4 network"),
        (["a=h:1", "b=h:2", "--network", "nonsense"], "give one like 10.83.0.0/24"),
    ],
)
def test_what_makes_no_network_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert init(tmp_path / "mesh", "--clusters", *words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "mesh").exists()
