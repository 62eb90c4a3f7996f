"""A way to the coordinator that only who holds the run secret can take.

torchft's lighthouse neither encrypts nor asks who is there. So it listens on the loopback address
alone; in front of it, and on the other end in every cluster, stands a relay, and between the two
is TLS 1.3, in which each proves that it holds the secret: both have the certificate whose key
follows from it, and accept no other.
"""

import asyncio
import datetime
import logging
import secrets
import socket
import ssl
import tempfile
import threading
from contextvars import ContextVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from dsx.exchange.address import Address
from dsx.exchange.secret import RunSecret

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
DEAD_SECONDS = 10
_CHUNK = 2**16
_MOST_TOLD = 1000
"""Different refusals that are told; more are a flood."""

_claimed: ContextVar[list[str]] = ContextVar("claimed")
"""The name that whoever is about to be let in has given, before it has proved anything."""


def tls_context(secret: RunSecret, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 with whoever holds the same secret, and nobody else."""
    key = Ed25519PrivateKey.from_private_bytes(secret.key("certificate"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dsx run")])
    # Everything in it is fixed, so that both ends make the same one.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, algorithm=None)
        .public_bytes(serialization.Encoding.PEM)
    )
    # `ssl` reads keys from files only; this one has a password that nobody else ever sees.
    password = secrets.token_bytes(32).hex().encode()
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + encrypted)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


class Relay:
    """Carries connections to `listen` on to `target`, in a thread of its own.

    Args:
        listen: host and port; port 0 takes a free one.
        target: host and port.
        secret: of the run.
        name: of the cluster whose end this is, told to the coordinator's; None makes this the
            coordinator's end, which lets in who holds the secret and tells whom it refuses.

    Raises:
        OSError: `listen` can't be listened on.
    """

    def __init__(
        self, listen: Address, target: Address, secret: RunSecret, name: str | None = None
    ) -> None:
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        """The port that it listens on."""
        self._target = target
        self._name = name
        self._tls = tls_context(secret, server=name is None)
        if name is None:
            self._tls.sni_callback = lambda _, given, __: _claimed.get().append(given)
        self._told: set[tuple[str, str]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop) | {accepting}
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()
            self._listener.close()

    async def _accept(self) -> None:
        carrying = set()
        while True:
            connection, address = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._carry(connection, str(address[0])))
            carrying.add(task)
            task.add_done_callback(carrying.discard)

    async def _carry(self, connection: socket.socket, address: str) -> None:
        ends: list[asyncio.StreamWriter] = []
        try:
            near, near_writer = await self._near(connection, address)
            ends.append(near_writer)
            far, far_writer = await self._far()
            ends.append(far_writer)
            await asyncio.gather(_pump(near, far_writer), _pump(far, near_writer))
        except OSError:
            pass  # Whoever is at the near end sees that the connection has ended, and tries again.
        finally:
            for end in ends:
                end.transport.abort()

    async def _near(
        self, connection: socket.socket, address: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        claimed: list[str] = []
        _claimed.set(claimed)  # The loop's callbacks for this connection inherit it.
        options: dict = {}
        if self._name is None:
            _end_when_dead(connection)
            options = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, **options
            )
        except OSError as error:
            self._refuse(address, claimed[0] if claimed else None, error)
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _far(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._name is None:
            return await asyncio.open_connection(*self._target)
        opening = asyncio.open_connection(
            *self._target, ssl=self._tls, server_hostname=server_name(self._name)
        )
        # Not for the two minutes of the system: the link may be there again long before.
        reader, writer = await asyncio.wait_for(opening, HANDSHAKE_SECONDS)
        _end_when_dead(writer.get_extra_info("socket"))
        return reader, writer

    def _refuse(self, address: str, claimed: str | None, error: OSError) -> None:
        """Tell whom and why, once: who is refused tries again and again."""
        reason = explain_refusal(error)
        who = f"cluster {claimed!r} at {address}" if claimed else address
        if reason is not None and len(self._told) < _MOST_TOLD and (who, reason) not in self._told:
            self._told.add((who, reason))
            log.warning("refused %s: it %s", who, reason)


def server_name(cluster: str) -> str:
    """The cluster's name as TLS can carry it."""
    try:
        cluster.encode("idna")
    except UnicodeError:
        return "cluster"
    return cluster


def explain_refusal(error: OSError) -> str | None:
    """What somebody who did not get in has done; None for who went away by itself."""
    if not isinstance(error, ssl.SSLError):
        return None if isinstance(error, ConnectionError) else "did not finish its greeting"
    text = str(error).lower()
    if "http_request" in text or "http request" in text or "wrong_version" in text:
        return "has no run secret"
    if "did_not_return" in text or "did not return" in text:
        return "has no run secret"
    if "unknown_ca" in text or "unknown ca" in text or "verif" in text or "bad certificate" in text:
        return "has another run secret"
    return f"does not greet like a cluster of this run ({error.reason or error})"


def _end_when_dead(connection: socket.socket) -> None:
    """Let a connection over a link that was cut fail within `DEAD_SECONDS`, so that whoever uses
    it makes a new one. By default that takes the system a quarter of an hour."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Where the system has these; each is about another silence.
    for name, value in (
        ("TCP_USER_TIMEOUT", 1000 * DEAD_SECONDS),
        ("TCP_KEEPIDLE", DEAD_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", DEAD_SECONDS // 2),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
    finally:
        target.close()
