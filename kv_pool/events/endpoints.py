"""ZeroMQ endpoints: bind or connect, the ports of data-parallel ranks, loopback addresses."""

import errno
import ipaddress
import os
import re
import socket
import stat

from kv_pool.errors import EndpointError, InvalidArgumentError

MAX_PORT = 65535

_SCHEMES = ("tcp://", "ipc://", "inproc://")
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^\[\]:]+|::|::1):(?P<port>\d{1,5}|\*)")


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidArgumentError if this is not a tcp, ipc or inproc endpoint."""
    if not endpoint.startswith(_SCHEMES):
        raise InvalidArgumentError(
            f"endpoint is {endpoint!r}; write tcp://host:port, ipc:///path or inproc://name"
        )
    if endpoint.startswith("tcp://"):
        _, port = _split_tcp(endpoint)
        if port != "*" and int(port) > MAX_PORT:
            raise InvalidArgumentError(f"endpoint is {endpoint!r}; a port is at most {MAX_PORT}")
    elif endpoint in _SCHEMES:
        raise InvalidArgumentError(f"endpoint is {endpoint!r}; a path or name is missing")


def should_bind(endpoint: str) -> bool:
    """Return True if a publisher binds this endpoint by default, False if it connects to it.

    As in vLLM, it binds ipc, inproc and addresses with `*` or `::`, and connects to other hosts. Unlike vLLM,
    it also binds loopback addresses, 0.0.0.0 and its IPv6 form, where vLLM connects to a subscriber that
    binds them.
    """
    if "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
        return True
    host, _ = _split_tcp(endpoint)
    address = _parse_address(host)
    return is_loopback(endpoint) or (address is not None and address.is_unspecified)


def check_unused(endpoint: str) -> None:
    """Check that an ipc endpoint may be bound; ZeroMQ would replace any file at its path.

    Raises:
        EndpointError: another socket listens there, or the file is no socket.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith(("@", "*")):  # abstract names, and names that ZeroMQ chooses
        return
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return
    if not is_socket:
        raise EndpointError(errno.EEXIST, f"cannot bind {endpoint}: a file that is no socket has this path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):  # left by a process that has ended
            return
        except OSError:  # a socket of another user, or a busy one
            pass
    raise EndpointError(
        errno.EADDRINUSE,
        f"cannot bind {endpoint}: another process or object listens there; close it, or use another path",
    )


def is_loopback(endpoint: str) -> bool:
    """Return True if the endpoint is reachable only from this machine."""
    if not endpoint.startswith("tcp://"):
        return True
    host, _ = _split_tcp(endpoint)
    address = _parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_ipv6(endpoint: str) -> bool:
    """Return True if the endpoint needs ZeroMQ's IPv6 option."""
    return endpoint.startswith("tcp://") and ":" in _split_tcp(endpoint)[0]


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address of a host, IPv6 with or without brackets; None for names."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: tcp port plus rank, inproc name plus `_dp<rank>`.

    A wildcard port (0 or `*`) is unchanged.

    Raises:
        InvalidArgumentError: rank above 0 on another scheme, or a port beyond 65535.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise InvalidArgumentError(
            f"endpoint {endpoint!r} cannot be offset by data-parallel rank {rank}; use tcp or inproc, "
            f"or configure each rank with its own path and data_parallel_rank 0"
        )
    host, port = _split_tcp(endpoint)
    if port in ("0", "*"):
        return endpoint
    if int(port) + rank > MAX_PORT:
        raise InvalidArgumentError(
            f"endpoint {endpoint!r} with data-parallel rank {rank} is port {int(port) + rank}; "
            f"a port is at most {MAX_PORT}"
        )
    return f"tcp://{host}:{int(port) + rank}"


def _split_tcp(endpoint: str) -> tuple[str, str]:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise InvalidArgumentError(
            f"endpoint is {endpoint!r}; write tcp://host:port, port 0 for a free one, IPv6 in brackets"
        )
    return match["host"], match["port"]
