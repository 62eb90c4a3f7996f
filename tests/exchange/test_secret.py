"""The run secret's file, and what may be opened without one."""

import os
import pickle
import stat
from pathlib import Path

import pytest

from dsx.cli import main
from dsx.errors import LaunchError, SettingsError
from dsx.exchange.secret import RunSecret, is_loopback, require_secret


def test_a_new_secret_is_its_owners_alone_and_another_each_time(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "two"):
        RunSecret.create(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        keys.append(RunSecret.read(tmp_path / name).key("purpose"))
    assert keys[0] != keys[1]
    assert RunSecret.read(tmp_path / "one").key("purpose") == keys[0]


def test_keys_of_two_purposes_or_salts_have_nothing_in_common() -> None:
    secret = RunSecret(b"s" * 32)
    assert len({secret.key("a"), secret.key("b"), secret.key("a", b"salt")}) == 3


def test_a_secret_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    RunSecret.create(tmp_path / "secret")
    before = (tmp_path / "secret").read_text()
    with pytest.raises(LaunchError, match="is there already"):
        RunSecret.create(tmp_path / "secret")
    assert (tmp_path / "secret").read_text() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_can_read_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "secret"
    RunSecret.create(path)
    path.chmod(mode)
    with pytest.raises(LaunchError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        RunSecret.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    RunSecret.create(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(LaunchError, match="belongs to user 12345"):
        RunSecret.read(path)


@pytest.mark.parametrize("text", ["", "0123", "g" * 64, "a" * 63, "a" * 65, "A" * 64])
def test_a_file_that_holds_no_secret_is_refused_without_showing_it(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(LaunchError, match="holds no run secret") as refusal:
        RunSecret.read(path)
    assert not text or text not in str(refusal.value)


def test_a_file_that_is_not_there_is_told_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="dsx secret new FILE"):
        RunSecret.read(tmp_path / "nothing")


def test_a_secret_shows_itself_nowhere() -> None:
    secret = RunSecret(b"never seen" * 4)
    assert "never seen" not in repr(secret) + str(secret)
    with pytest.raises(TypeError, match="not sent"):
        pickle.dumps(secret)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.5.5.5", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("10.8.0.1", False),
        ("no such host", False),
    ],
)
def test_what_only_this_machine_reaches_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    if not expected:
        with pytest.raises(SettingsError, match=r"--bind is .*dsx secret new FILE"):
            require_secret(None, host, "--bind")
    require_secret(RunSecret(b"s" * 32), host, "--bind")


def test_the_command_makes_one_and_refuses_to_replace_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys" / "of-the-run" / "secret"
    assert main.main(["secret", "new", str(path)]) == 0
    printed = capsys.readouterr()
    assert str(path) in printed.out
    assert path.read_text().strip() not in printed.out + printed.err
    assert main.main(["secret", "new", str(path)]) == 1
    assert "is there already" in capsys.readouterr().err


def test_a_coordinator_that_others_can_reach_needs_a_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for host in ("0.0.0.0", "203.0.113.5"):
        assert main.main(["coordinator", "--bind", f"{host}:0"]) == 2
        assert "there is no run secret" in capsys.readouterr().err
