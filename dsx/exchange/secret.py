"""The run secret: what the clusters of one run, and nobody else, have in a file of their own.

Whatever needs a key takes one that is derived from it for that purpose alone (HKDF, RFC 5869).
"""

import ipaddress
import os
import re
import secrets
import socket
import stat
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dsx.errors import LaunchError, SettingsError

KEY_BYTES = 32


class RunSecret:
    """The secret in memory. It shows itself nowhere: not in `repr`, not in pickles."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def read(path: str | Path) -> "RunSecret":
        """The secret in a file that `create` has made.

        Raises:
            LaunchError: the file can't be read, may be read by others, or holds no secret.
        """
        try:
            with open(path, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                text = file.read(4 * KEY_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(
                f"the run secret can't be read from {path} ({error}); make one with `dsx secret "
                "new FILE`, and copy it to every machine of the run under the path that is given "
                "there"
            ) from error
        problem = ownership_problem(status)
        if problem is not None:
            raise LaunchError(f"the run secret in {path} {problem}: chmod 600 {path}")
        if re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", text) is None:
            raise LaunchError(
                f"{path} holds no run secret: {2 * KEY_BYTES} hexadecimal digits are due; make one "
                "with `dsx secret new FILE`"
            )
        return RunSecret(bytes.fromhex(text))

    @staticmethod
    def create(path: str | Path) -> None:
        """Write a new secret into a new file that only its owner can read; makes its folder, too.

        Raises:
            LaunchError: the file is there already, or can't be written.
        """
        folder = Path(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"{folder} can't be made: {error}; choose another path") from error
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise LaunchError(
                f"{path} is there already, and may be the secret of a run; choose another name, "
                "or remove it"
            ) from error
        except OSError as error:
            raise LaunchError(f"{path} can't be written: {error}; choose another path") from error
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(secrets.token_hex(KEY_BYTES) + "\n")

    def key(self, purpose: str, salt: bytes = b"") -> bytes:
        """32 bytes that nobody without the secret can know, others for each purpose and salt."""
        return HKDF(SHA256(), KEY_BYTES, salt, b"dsx " + purpose.encode()).derive(self._secret)

    def __reduce__(self) -> str:
        raise TypeError("a run secret is not sent anywhere")


def ownership_problem(status: os.stat_result) -> str | None:
    """Why a file of this status does not keep a secret; None where it does."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to this one ({os.geteuid()})"
    if status.st_mode & 0o077:
        return f"may be read by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine and reached from nowhere else."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)


def require_secret(secret: RunSecret | None, host: str, argument: str) -> None:
    """Nothing is opened to a network without a secret.

    Raises:
        SettingsError: `host`, the value of `argument`, is not the loopback address, and there is no
            secret.
    """
    if secret is None and not is_loopback(host):
        raise SettingsError(
            f"{argument} is {host}, which others than this machine can reach, and there is no run "
            "secret; make one with `dsx secret new FILE`, copy it to every machine of the run, and "
            "give --secret-file FILE to `dsx coordinator` and to every cluster"
        )
