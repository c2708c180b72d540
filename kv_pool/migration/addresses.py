"""Addresses of nodes, written `host:port`, and sockets bound or connected to them."""

import ipaddress
import socket

from kv_pool.errors import EndpointError, InvalidArgumentError, PeerUnavailableError

_BACKLOG = 128
_MAX_PORT = 65_535


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address is in brackets, `[::1]:7000`.

    Raises:
        InvalidArgumentError: it is not written so.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > _MAX_PORT:
        raise InvalidArgumentError(
            f"{address!r} is no address of a node; write host:port, such as 127.0.0.1:7000 or [::1]:7000"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """What `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Can only programs on this machine reach this numeric address?"""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def bind_listener(address: str) -> socket.socket:
    """A socket that listens there; port 0 for any that is free.

    Raises:
        InvalidArgumentError: this is no address.
        EndpointError: it can not be had, such as a port in use. Nothing is open.
    """
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise EndpointError(
            error.errno,
            f"{address}: can not listen there: {error.strerror or error}. Port 0 takes a free one",
        ) from error


def connect_to(address: str, timeout_s: float) -> socket.socket:
    """A connection to whoever listens there. Small messages are sent at once (no Nagle).

    Raises:
        InvalidArgumentError: this is no address.
        PeerUnavailableError: nobody answers there in time.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), max(timeout_s, 0.001))
    except OSError as error:
        why = "nobody answered in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerUnavailableError(f"{address}: can not connect: {why}") from error
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice in the end when the other machine has gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
