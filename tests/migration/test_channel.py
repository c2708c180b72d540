import random
import time

import pytest
from migration.made_channels import Beside, make_end, make_frame, make_pair, soon

from kv_pool.errors import InvalidArgumentError, PeerAuthenticationError, PeerUnavailableError
from kv_pool.migration.channel import MAX_MESSAGE_BYTES


def has_ended(other):
    try:
        return other.recv(1) == b""
    except ConnectionResetError:  # what it had sent was not read to its end
        return True


def receive_three(channel):
    for _ in range(3):
        channel.receive(soon())


def test_messages_arrive_in_order_both_ways():
    with make_pair() as (left, right):
        for payload in (b"", b"one", bytes(range(256)) * 300):
            sending = Beside(left.send, payload, soon())
            assert right.receive(soon()) == payload
            sending.get()
            right.send(payload + b"!", soon())
            assert left.receive(soon()) == payload + b"!"


def test_a_message_of_the_largest_size_arrives():
    payload = bytes(MAX_MESSAGE_BYTES)
    with make_pair() as (left, right):
        sending = Beside(left.send, payload, soon())
        assert right.receive(soon()) == payload
        sending.get()


def test_a_larger_message_is_not_sent():
    with make_pair() as (left, right):
        with pytest.raises(InvalidArgumentError, match="is the most"):
            left.send(bytes(MAX_MESSAGE_BYTES + 1), soon())
        left.send(b"next", soon())
        assert right.receive(soon()) == b"next"


def test_a_message_larger_than_allowed_here_ends_the_connection():
    with make_pair() as (left, right):
        left.send(bytes(101), soon())
        with pytest.raises(PeerAuthenticationError, match="101 bytes has come where 100 is the most"):
            right.receive(soon(), max_bytes=100)
        with pytest.raises(PeerUnavailableError):
            left.receive(soon())


def test_a_change_at_any_place_is_noticed_before_anything_is_waited_for():
    (frame,) = make_frame(b"a message")
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 1 << place % 8
        with make_end() as (channel, other):
            other.sendall(changed)
            with pytest.raises(PeerAuthenticationError, match="ended"):
                channel.receive(soon())
            assert has_ended(other)
            with pytest.raises(PeerUnavailableError):
                channel.receive(soon())


def test_messages_that_come_twice_or_late_are_noticed():
    one, two, three = make_frame(b"one", b"two", b"three")
    for stream in (one + one, two, one + three, two + one, one + two + two):
        with make_end() as (channel, other):
            other.sendall(stream)
            with pytest.raises(PeerAuthenticationError):
                receive_three(channel)


def test_a_message_sent_back_to_its_sender_is_noticed():
    with make_end() as (channel, other):
        channel.send(b"hello", soon())
        other.sendall(other.recv(1 << 16))
        with pytest.raises(PeerAuthenticationError):
            channel.receive(soon())


def test_parts_of_two_messages_do_not_make_a_third():
    one, two = make_frame(b"same length", b"equal bytes")
    with make_end() as (channel, other):
        other.sendall(one[:20] + two[20:])
        with pytest.raises(PeerAuthenticationError, match="changed on the way"):
            channel.receive(soon())


def test_garbage_is_no_message():
    rng = random.Random(0)
    for _ in range(100):
        with make_end() as (channel, other):
            other.sendall(rng.randbytes(rng.randrange(20, 200)))
            with pytest.raises(PeerAuthenticationError):
                channel.receive(soon())


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 40])
def test_a_message_that_is_cut_off_is_a_peer_that_has_gone(num_bytes):
    (frame,) = make_frame(b"a message")
    with make_end() as (channel, other):
        other.sendall(frame[:num_bytes])
        other.close()
        with pytest.raises(PeerUnavailableError, match="hung up"):
            channel.receive(soon())


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 40])
def test_a_message_that_does_not_end_is_waited_for_until_the_deadline(num_bytes):
    (frame,) = make_frame(b"a message")
    with make_end() as (channel, other):
        other.sendall(frame[:num_bytes])
        with pytest.raises(PeerUnavailableError, match="not answered in time"):
            channel.receive(time.monotonic() + 0.05)
        assert has_ended(other)


def test_a_peer_that_takes_nothing_is_waited_for_until_the_deadline():
    with make_end() as (channel, _), pytest.raises(PeerUnavailableError, match="in time"):
        channel.send(bytes(8 << 20), time.monotonic() + 0.05)


def test_waiting_leaves_what_comes():
    with make_pair() as (left, right):
        assert not right.wait_for_more(0.01)
        left.send(b"here", soon())
        assert right.wait_for_more(60.0)
        assert right.receive(soon()) == b"here"
        left.close()
        with pytest.raises(PeerUnavailableError):
            right.wait_for_more(60.0)


def test_a_quiet_channel_is_one_that_can_be_used_again():
    with make_pair() as (left, right):
        assert left.is_quiet()
        right.send(b"unexpected", soon())
        assert not left.is_quiet()
        assert right.is_quiet()
        left.close()
        assert not left.is_quiet()
        assert not right.is_quiet()


def test_aborting_wakes_the_thread_that_waits():
    with make_pair() as (left, _):
        waiting = Beside(left.receive, soon())
        left.abort()
        assert isinstance(waiting.get_error(), PeerUnavailableError)


@pytest.mark.parametrize("seed", range(5))
def test_raw_bytes_go_through_views_of_any_sizes(seed):
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
        sending = Beside(left.send_raw, cut(memoryview(data)), soon())
        assert right.receive(soon()) == b"bytes follow"
        right.receive_raw(cut(memoryview(received)), soon())
        sending.get()
        assert received == data
        sending = Beside(left.send, b"more", soon(), cut(memoryview(data)))
        assert right.receive(soon()) == b"more"
        received[:] = bytes(len(data))
        right.receive_raw(cut(memoryview(received)), soon())
        sending.get()
        assert received == data
        left.send(b"and a message", soon())
        assert right.receive(soon()) == b"and a message"


def test_no_raw_bytes_are_none():
    with make_pair() as (left, right):
        left.send_raw([], soon())
        right.receive_raw([memoryview(bytearray(0))] * 3, soon())
        left.send(b"still", soon())
        assert right.receive(soon()) == b"still"
