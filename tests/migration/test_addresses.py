import socket

import pytest

from kv_pool.errors import EndpointError, InvalidArgumentError, PeerUnavailableError
from kv_pool.migration.addresses import (
    bind_listener,
    connect_to,
    format_address,
    is_loopback,
    parse_address,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:7000", "127.0.0.1", 7000), ("node-1:0", "node-1", 0), ("[::1]:65535", "::1", 65535)],
)
def test_addresses_are_parsed_and_formatted(address, host, port):
    assert parse_address(address) == (host, port)
    assert format_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", "node", ":7000", "node:", "node:x", "node:-1", "node:65536", "::1:7000", "[]:7", "node:²"]
)
def test_invalid_addresses_are_refused(address):
    with pytest.raises(InvalidArgumentError, match="host:port"):
        parse_address(address)


def test_is_loopback_recognizes_loopback_addresses():
    found = [is_loopback(host) for host in ("127.3.2.1", "::1", "0.0.0.0", "::", "fe80::1%eth0")]
    assert found == [True, True, False, False, False]


def test_sockets_listen_and_connect_or_name_the_address():
    with bind_listener("127.0.0.1:0") as listener:
        address = format_address(*listener.getsockname())
        with connect_to(address, 5.0) as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(EndpointError, match="Port 0 selects a free port"):
            bind_listener(address)
    with pytest.raises(PeerUnavailableError, match=address):
        connect_to(address, 5.0)
    with pytest.raises(EndpointError, match="cannot listen"):
        bind_listener("192.0.2.1:0")
