import random
import time

import pytest
from migration.made_channels import LONG, beside, make_pair, soon

from kv_pool.errors import PeerUnavailableError


def receive(channel, num_bytes, deadline=None):
    data = bytearray(num_bytes)
    channel.receive([memoryview(data)], deadline or soon())
    return data


@pytest.mark.parametrize("num_bytes", [0, 3])
def test_incomplete_bytes_are_a_missing_peer(num_bytes):
    for ends, deadline, message in (
        (True, soon(), "the right closed the connection"),
        (False, time.monotonic() + 0.05, "did not answer in time"),
        (False, time.monotonic() - 1, "did not answer in time"),
    ):
        with make_pair() as (left, right):
            right.send([memoryview(bytes(num_bytes))], soon())
            if ends:
                right.close()
            with pytest.raises(PeerUnavailableError, match=message):
                receive(left, 9, deadline)


def test_a_peer_that_reads_nothing_times_out():
    with make_pair() as (left, _), pytest.raises(PeerUnavailableError, match="in time"):
        left.send([memoryview(bytes(8 << 20))], time.monotonic() + 0.05)


def test_abort_wakes_a_waiting_thread():
    with make_pair() as (left, _):
        waiting = beside(receive, left, 1)
        left.abort()
        assert isinstance(waiting.exception(LONG), PeerUnavailableError)


@pytest.mark.parametrize("seed", range(5))
def test_raw_bytes_pass_through_views_of_any_size(seed):
    rng = random.Random(seed)
    data = rng.randbytes(3_000_000)

    def cut(memory):
        most = rng.choice([300, 3000, 300_000])
        views, start = [], 0
        while start < len(memory):
            size = rng.randrange(most)
            views.append(memory[start : start + size])
            start += size
        return views

    received = bytearray(len(data))
    with make_pair() as (left, right):
        sending = beside(left.send, cut(memoryview(data)), soon())
        right.receive(cut(memoryview(received)), soon())
        sending.result(LONG)
        assert received == data
        left.send([], soon())
        right.receive([memoryview(bytearray(0))] * 3, soon())
        left.send([memoryview(b"more")], soon())
        assert receive(right, 4) == b"more"
