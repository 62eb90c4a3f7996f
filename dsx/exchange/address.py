"""Where clusters meet, as arguments say it. Quick to import: a wrong one is told at once."""

from urllib.parse import urlsplit

from dsx.errors import SettingsError

Address = tuple[str, int]
"""Host, without brackets, and port."""


def read_bind(bind: str) -> Address:
    """`HOST:PORT` of `--bind`. Raises SettingsError."""
    host, separator, port = bind.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(
            f"--bind is {bind!r}; give HOST:PORT with a port up to 65535, for example "
            "127.0.0.1:29510 (port 0 takes a free one)"
        )
    return host.strip("[]"), int(port)


def read_coordinator(coordinator: str) -> Address:
    """`http://HOST:PORT` of `--coordinator`. Raises SettingsError."""
    parts = urlsplit(coordinator)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or host is None or port is None:
        raise SettingsError(
            f"--coordinator is {coordinator!r}; give an address like http://127.0.0.1:29510"
        )
    return host, port
