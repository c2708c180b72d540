"""The sockets of a publisher: either both open or none; encrypted if configured. Imports pyzmq for all."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kv_pool.errors import EndpointError, InvalidArgumentError, MissingDependencyError, describe_install
from kv_pool.events.curve_keys import load_key_pair
from kv_pool.events.endpoints import check_unused, is_ipv6, is_loopback, should_bind
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.loggers import get_logger
from kv_pool.threads import make_out_of_threads

try:
    import zmq as zmq
    import zmq.utils.monitor
    import zmq.utils.z85
except ImportError as error:
    raise MissingDependencyError(
        f"an event stream, or a node that other processes reach, needs pyzmq: {describe_install('zmq')}"
    ) from error

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_logger = get_logger(__name__)

MAX_RECEIVED_BYTES = 4096
"""Maximum size of a received frame, a subscription or a number; a peer that sends more is disconnected."""

REPLAY_HWM = 16
"""Number of replies that ZeroMQ holds for one reader; the replay server sends more as these are read."""

MAX_QUEUED_REQUESTS = 64
"""Number of requests that ZeroMQ holds per reader."""

HANDSHAKE_MS = 10_000
"""Time limit of the ZeroMQ handshake; connections without a valid key fail it."""

MAX_TIMEOUT_MS = 2**31 - 1
"""Maximum of a time limit in ZeroMQ."""


class PublisherSockets:
    """A PUB socket for live batches and, if replay is configured, a ROUTER socket.

    They use a ZeroMQ context of their own, but with an inproc endpoint `zmq.Context.instance()`, so that
    other sockets of the process can connect. Each socket is used and closed by one thread at a time; call
    `end` after that.

    Attributes:
        context, live, replay: the context and its sockets; `replay` may be None.
        endpoint, replay_endpoint: with the actual port instead of 0.

    Raises:
        EndpointError: a socket that cannot be opened, bound or connected. Nothing is left open.
        InvalidArgumentError: a key file that cannot be used. Nothing is left open.
        OutOfThreadsError: no thread could be started to check the keys of readers. Nothing is left open.
    """

    def __init__(self, config: PublisherConfig) -> None:
        endpoint, replay_endpoint = config.rank_endpoint, config.rank_replay_endpoint
        endpoints = [endpoint] if replay_endpoint is None else [endpoint, replay_endpoint]
        self._is_shared = any(address.startswith("inproc://") for address in endpoints)
        self._keys: tuple[bytes, bytes] | None = None  # the public one and the secret one
        self._authenticator: ThreadAuthenticator | None = None
        self.replay: zmq.SyncSocket | None = None
        self.replay_endpoint: str | None = None
        with report_failure(endpoint), ExitStack() as on_failure:
            self.context = zmq.Context.instance() if self._is_shared else zmq.Context()
            on_failure.callback(self.end)
            if config.curve_secret_key_file is not None:
                self._keys = load_key_pair("curve_secret_key_file", config.curve_secret_key_file)
            if config.curve_client_keys_dir is not None:
                self._admit_only(config.curve_client_keys_dir)
            self.live = self._open(zmq.PUB, endpoints, config, config.hwm, on_failure)
            binds = should_bind(endpoint) if config.bind is None else config.bind
            self.endpoint = attach(self.live, endpoint, binds)
            if replay_endpoint is not None:
                self.replay = self._open(zmq.ROUTER, endpoints, config, REPLAY_HWM, on_failure)
                self.replay.setsockopt(zmq.RCVHWM, MAX_QUEUED_REQUESTS)
                # Otherwise ZeroMQ silently drops replies to a slow reader, including the end marker.
                self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = attach(self.replay, replay_endpoint, binds=True)
            if self._keys is None and not all(map(is_loopback, endpoints)):
                _logger.warning(
                    "any reader that can connect to %s can read the token ids of all prompts; use CURVE keys",
                    " or ".join(filter(None, (self.endpoint, self.replay_endpoint))),
                )
            on_failure.pop_all()

    def end(self) -> None:
        """Wait up to `linger_s` until the closed sockets have sent their messages."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if not self._is_shared:
            self.context.term()

    def _open(
        self, kind: int, endpoints: list[str], config: PublisherConfig, hwm: int, on_failure: ExitStack
    ) -> "zmq.SyncSocket":
        socket = self.context.socket(kind)
        on_failure.callback(socket.close, linger=0)
        socket.setsockopt(zmq.LINGER, int(config.linger_s * 1000))
        # The system closes a TCP connection that takes no bytes for this long; ZeroMQ frees its messages.
        socket.setsockopt(zmq.TCP_MAXRT, max(1, min(int(config.slow_reader_s * 1000), MAX_TIMEOUT_MS)))
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, any(map(is_ipv6, endpoints)))
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys
        return socket

    def _admit_only(self, keys_dir: str) -> None:
        """Start a thread that admits only the readers whose public keys are in a directory.

        Raises:
            InvalidArgumentError: a directory that cannot be read, or has no keys.
            OutOfThreadsError: the system cannot start the thread.
        """
        from zmq.auth import load_certificates
        from zmq.auth.thread import ThreadAuthenticator

        try:
            if not load_certificates(keys_dir):
                raise InvalidArgumentError("no .key file, so no reader could connect; add public keys")
            authenticator = self._authenticator = ThreadAuthenticator(self.context)
            try:
                authenticator.start()
            except Exception as error:
                _close_unused_pipes(authenticator)
                if isinstance(error, (RuntimeError, MemoryError)):
                    raise make_out_of_threads("kv_pool authenticator", error) from error
                raise
            authenticator.configure_curve(domain="*", location=keys_dir)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"curve_client_keys_dir {keys_dir}: {error}") from error


def _close_unused_pipes(authenticator: "ThreadAuthenticator") -> None:
    """Close the sockets to a thread that does not run: `stop` would wait for it, and the context for them."""
    if not authenticator.is_alive():
        for owner in (authenticator, authenticator.thread):
            if owner is not None and owner.pipe is not None:
                owner.pipe.close(linger=0)
                owner.pipe = None  # type: ignore[assignment] # as its `stop` does


@contextmanager
def report_failure(endpoint: str) -> Iterator[None]:
    """Raise EndpointError for a socket that the system does not open, such as without file descriptors."""
    try:
        yield
    except EndpointError:
        raise
    except (zmq.ZMQError, OSError) as error:
        raise EndpointError(error.errno, f"cannot open the sockets for {endpoint}: {error}") from error


def attach(socket: "zmq.SyncSocket", endpoint: str, binds: bool) -> str:
    """Bind or connect a socket; return its endpoint with the actual port.

    Raises:
        EndpointError: the endpoint is in use, or cannot be bound or connected to.
    """
    try:
        if not binds:
            socket.connect(endpoint)
            return endpoint
        check_unused(endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if binds else "connect to"
        way_out = (
            "is another publisher running? Use another port, or 0 for a free one"
            if error.errno == zmq.EADDRINUSE
            else "a program binds to addresses of this machine and connects to those of other machines"
        )
        raise EndpointError(error.errno, f"cannot {verb} {endpoint}: {error}; {way_out}") from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
