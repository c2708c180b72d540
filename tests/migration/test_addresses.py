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
def test_addresses_are_read_and_written(address, host, port):
    assert parse_address(address) == (host, port)
    assert format_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", "node", ":7000", "node:", "node:x", "node:-1", "node:65536", "::1:7000", "[]:7", "node:²"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidArgumentError, match="host:port"):
        parse_address(address)


def test_loopback_is_told_from_the_rest():
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("fe80::1%eth0")


def test_a_port_in_use_is_an_error_with_the_way_out():
    with bind_listener("127.0.0.1:0") as listener:
        taken = format_address(*listener.getsockname())
        with pytest.raises(EndpointError, match="Port 0 takes a free one"):
            bind_listener(taken)


def test_a_host_that_does_not_exist_is_an_error():
    with pytest.raises(EndpointError, match="can not listen"):
        bind_listener("192.0.2.1:0")


def test_nobody_there_is_an_error_that_names_the_address():
    with bind_listener("127.0.0.1:0") as listener:
        address = format_address(*listener.getsockname())
    with pytest.raises(PeerUnavailableError, match=address):
        connect_to(address, 5.0)


def test_small_messages_are_sent_at_once():
    with (
        bind_listener("127.0.0.1:0") as listener,
        connect_to(format_address(*listener.getsockname()), 5.0) as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
