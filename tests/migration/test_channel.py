import random
import time

import pytest
from migration.made_channels import LONG, beside, has_ended, make_end, make_frame, make_pair, soon

from kv_pool.errors import InvalidArgumentError, PeerAuthenticationError, PeerUnavailableError
from kv_pool.migration import channel as channel_module
from kv_pool.migration.channel import MAX_MESSAGE_BYTES


def receive_three(channel):
    for _ in range(3):
        channel.receive(soon())


def test_messages_arrive_in_order_in_both_directions():
    with make_pair() as (left, right):
        for payload in (b"", b"one", bytes(range(256)) * 300):
            sending = beside(left.send, payload, soon())
            assert right.receive(soon()) == payload
            sending.result(LONG)
            right.send(payload + b"!", soon())
            assert left.receive(soon()) == payload + b"!"


def test_messages_up_to_the_maximum_size_are_sent():
    payload = bytes(MAX_MESSAGE_BYTES)
    with make_pair() as (left, right):
        with pytest.raises(InvalidArgumentError, match="the maximum is"):
            left.send(payload + b"!", soon())
        sending = beside(left.send, payload, soon())
        assert right.receive(soon()) == payload
        sending.result(LONG)


def test_an_oversized_message_ends_the_connection(monkeypatch):
    with make_pair() as (left, right):
        left.send(bytes(101), soon())
        monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 100)
        with pytest.raises(PeerAuthenticationError, match="101 bytes; the maximum is 100"):
            right.receive(soon())
        with pytest.raises(PeerUnavailableError):
            left.receive(soon())


def test_a_change_of_any_byte_is_detected_without_waiting():
    (frame,) = make_frame(b"a message")
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 1 << place % 8
        with make_end() as (channel, other):
            other.sendall(changed)
            with pytest.raises(PeerAuthenticationError, match="closed"):
                channel.receive(soon())
            assert has_ended(other)
            with pytest.raises(PeerUnavailableError):
                channel.receive(soon())


def test_repeated_reordered_and_combined_messages_are_detected():
    one, two, three = make_frame(b"one", b"two", b"six")
    rng = random.Random(0)
    mixed = [one[:36] + two[36:], *(rng.randbytes(size) for size in range(36, 200, 9))]
    for stream in (one + one, two, one + three, two + one, one + two + two, *mixed):
        with make_end() as (channel, other):
            other.sendall(stream)
            with pytest.raises(PeerAuthenticationError):
                receive_three(channel)


def test_a_reflected_message_is_detected():
    with make_end() as (channel, other):
        channel.send(b"hello", soon())
        other.sendall(other.recv(1 << 16))
        with pytest.raises(PeerAuthenticationError):
            channel.receive(soon())


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 40])
def test_an_incomplete_message_is_a_missing_peer(num_bytes):
    (frame,) = make_frame(b"a message")
    for ends, deadline, message in (
        (True, soon(), "closed the connection"),
        (False, time.monotonic() + 0.05, "did not answer in time"),
    ):
        with make_end() as (channel, other):
            other.sendall(frame[:num_bytes])
            if ends:
                other.close()
            with pytest.raises(PeerUnavailableError, match=message):
                channel.receive(deadline)
            assert ends or has_ended(other)


def test_a_peer_that_reads_nothing_times_out():
    with make_end() as (channel, _), pytest.raises(PeerUnavailableError, match="in time"):
        channel.send(bytes(8 << 20), time.monotonic() + 0.05)


def test_wait_for_more_consumes_nothing():
    with make_pair() as (left, right):
        assert not right.wait_for_more(0.01)
        left.send(b"here", soon())
        assert right.wait_for_more(60.0)
        assert right.receive(soon()) == b"here"
        left.close()
        with pytest.raises(PeerUnavailableError):
            right.wait_for_more(60.0)


def test_a_quiet_channel_can_be_reused():
    with make_pair() as (left, right):
        assert left.is_quiet()
        right.send(b"unexpected", soon())
        assert not left.is_quiet()
        assert right.is_quiet()
        left.close()
        assert not left.is_quiet()
        assert not right.is_quiet()


def test_abort_wakes_a_waiting_thread():
    with make_pair() as (left, _):
        waiting = beside(left.receive, soon())
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
        left.send(b"bytes follow", soon())
        sending = beside(left.send_raw, cut(memoryview(data)), soon())
        assert right.receive(soon()) == b"bytes follow"
        right.receive_raw(cut(memoryview(received)), soon())
        sending.result(LONG)
        assert received == data
        sending = beside(left.send, b"more", soon(), cut(memoryview(data)))
        assert right.receive(soon()) == b"more"
        received[:] = bytes(len(data))
        right.receive_raw(cut(memoryview(received)), soon())
        sending.result(LONG)
        assert received == data
        left.send_raw([], soon())
        right.receive_raw([memoryview(bytearray(0))] * 3, soon())
        left.send(b"and a message", soon())
        assert right.receive(soon()) == b"and a message"
