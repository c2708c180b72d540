"""Addresses of nodes, written `host:port`, and sockets bound or connected to them."""

import ipaddress
import socket

from kv_pool.errors import EndpointError, InvalidArgumentError, PeerUnavailableError

_BACKLOG = 128
_MAX_PORT = 65_535


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and port of `host:port`. An IPv6 address is in brackets, `[::1]:7000`.

    Raises:
        InvalidArgumentError: `address` does not have this form.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > _MAX_PORT:
        raise InvalidArgumentError(
            f"{address!r} is not a node address; write host:port, such as 127.0.0.1:7000 or [::1]:7000"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return the `host:port` form that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine can reach this numeric address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def bind_listener(address: str) -> socket.socket:
    """Return a socket that listens at `address`. Port 0 selects a free port.

    Raises:
        InvalidArgumentError: `address` is not a valid address.
        EndpointError: the address cannot be used, for example because the port is in use. Nothing is open.
    """
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise EndpointError(
            error.errno,
            f"{address}: cannot listen: {error.strerror or error}. Port 0 selects a free port",
        ) from error


def resolve(address: str) -> str:
    """Return `address` with the host's numeric address, IPv4 if it has one.

    Raises:
        InvalidArgumentError: `address` is not a valid address.
        PeerUnavailableError: the host is unknown.
    """
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerUnavailableError(f"{address}: cannot connect: {error.strerror or error}") from error
    place = min(found, key=lambda one: one[0] != socket.AF_INET)[4]
    return format_address(str(place[0]), port)


def connect_to(address: str, timeout_s: float) -> socket.socket:
    """Connect to `address`. Small messages are sent immediately (TCP_NODELAY).

    Raises:
        InvalidArgumentError: `address` is not a valid address.
        PeerUnavailableError: the connection was refused or timed out.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), max(timeout_s, 0.001))
    except OSError as error:
        why = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerUnavailableError(f"{address}: cannot connect: {why}") from error
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Set TCP_NODELAY and SO_KEEPALIVE: no delay of small messages, and detection of dead peers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
