import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.endpoints import check_endpoint, is_ipv6, is_loopback, offset_endpoint, should_bind


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
        ("tcp://10.0.0.7:5557", False),
        ("tcp://router.example:5557", False),
        # vLLM connects to these three, SGLang binds the first one.
        ("tcp://0.0.0.0:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:0", True),
        ("tcp://[0:0:0:0:0:0:0:1]:5557", True),
        ("tcp://[0:0:0:0:0:0:0:0]:5557", True),
        ("tcp://[2001:db8:1:2:3:4:5:6]:5557", False),
    ],
)
def test_publisher_binds_local_endpoints(endpoint, binds):
    assert should_bind(endpoint) is binds


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("inproc://events", 0, "inproc://events"),
        ("inproc://events", 2, "inproc://events_dp2"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
    ],
)
def test_each_rank_has_its_own_endpoint(endpoint, rank, expected):
    assert offset_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "*:5557",
        "udp://*:5557",
        "tcp://",
        "tcp://*",
        "tcp://*:",
        "tcp://:5557",
        "tcp://*:five",
        "tcp://*:70000",
        "tcp://fe80:1:5557",
        "ipc://",
        "inproc://",
    ],
)
def test_invalid_endpoint_is_rejected(endpoint):
    with pytest.raises(InvalidArgumentError, match="endpoint is"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "is_own"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://::1:1", True),
        ("tcp://[0:0:0:0:0:0:0:1]:1", True),
        ("tcp://[0000:0:0::0001]:1", True),
        ("tcp://[fe80:0:0:0:0:0:0:1%lo]:1", False),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://127.example:1", False),
        ("tcp://10.0.0.7:1", False),
    ],
)
def test_loopback_endpoints_are_recognized(endpoint, is_own):
    check_endpoint(endpoint)
    assert is_loopback(endpoint) is is_own


def test_ipv6_endpoints_are_recognized():
    assert is_ipv6("tcp://[::1]:1")
    assert is_ipv6("tcp://:::1")
    assert is_ipv6("tcp://[0:0:0:0:0:0:0:1]:1")
    assert is_ipv6("tcp://[fe80:1:2:3:4:5:6:7%eth0]:1")
    assert not is_ipv6("tcp://*:1")
    assert not is_ipv6("tcp://router.example:1")
    assert not is_ipv6("ipc:///a::b")
