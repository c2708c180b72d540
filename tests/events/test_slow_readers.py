"""The cost of slow readers and idle connections, on real sockets."""

import os
import socket as tcp
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from events.deadlines import wait_until
from events.made_publisher import make_publisher
from events.stream_readers import Reader, Requester, Subscriber
from made_threads import no_new_threads

from kv_pool.core.kv_events import BlockStored
from kv_pool.errors import OutOfThreadsError
from kv_pool.events.live_backlog import return_free_memory
from kv_pool.events.reader_connections import ReaderConnections
from kv_pool.events.sequence_frames import pack_sequence
from kv_pool.events.stream_state import StreamState

MB = 2**20
TOKENS = [70_000] * 4_000
"""20 kB per batch."""

NEVER_READS = {"rcvhwm": 1, "rcvbuf": 4096}


def publish_20_kb(publisher, num_batches):
    """Publish batches of 20 kB, waiting at intervals to keep the queue short."""
    for number in range(num_batches):
        publisher.publish([BlockStored([number], None, TOKENS, len(TOKENS), None, "GPU", None)])
        if number % 100 == 99:
            wait_until(lambda: publisher.get_statistics().num_queued == 0, "sent")
    wait_until(lambda: publisher.get_statistics().num_queued == 0, "sent")


def count_resident_bytes():
    """Return the resident memory of the process after freeing memory of earlier tests."""
    return_free_memory()
    return read_resident_bytes()


def read_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_unread_replays_use_bounded_memory_and_return_it(caplog):
    """Each request of a connection that did not read used to hold the memory of the whole buffer."""
    with (
        make_publisher(buffer_steps=400, linger_s=0.0, slow_reader_s=1.0) as publisher,
        ExitStack() as stack,
    ):
        publish_20_kb(publisher, 400)
        before = count_resident_bytes()
        for _ in range(40):
            stalled = stack.enter_context(Reader(zmq.DEALER, publisher.replay_endpoint, **NEVER_READS))
            for _ in range(3):
                stalled.socket.send_multipart([b"", pack_sequence(0)])
        peak = 0

        def are_dropped():
            nonlocal peak
            peak = max(peak, read_resident_bytes())
            return publisher.get_statistics().num_readers_dropped >= 40

        wait_until(are_dropped, "dropped")
        assert peak - before < 64 * MB  # of 3 times 40 times 8 MB
        with Requester(publisher.replay_endpoint) as requester:
            requester.request(0)
            for number in range(400):
                assert requester.receive_frames()[2] == pack_sequence(number)
        wait_until(lambda: read_resident_bytes() - before < 16 * MB, "given back")
    assert len([record for record in caplog.records if "replays" in record.message]) <= 8


def test_slow_reader_does_not_block_the_replays_of_others():
    with (
        make_publisher(buffer_steps=400, linger_s=0.0) as publisher,
        Requester(publisher.replay_endpoint) as requester,
        Reader(zmq.DEALER, publisher.replay_endpoint, **NEVER_READS) as stalled,
    ):
        publish_20_kb(publisher, 400)
        stalled.socket.send_multipart([b"", pack_sequence(0)])
        for _ in range(3):
            assert len(requester.ask(0)) == 400
        assert publisher.get_statistics().num_readers_dropped == 0


def test_unread_snapshots_share_the_memory_of_one():
    with (
        make_publisher(StreamState(), buffer_steps=1, linger_s=0.0, slow_reader_s=1.0) as publisher,
        ExitStack() as stack,
    ):
        tokens = TOKENS * 500
        for number in range(3):
            publisher.publish([BlockStored([number], None, tokens, len(tokens), None, "GPU", None)])
        wait_until(lambda: publisher.get_statistics().num_batches_sent == 3, "sent")
        with Requester(publisher.replay_endpoint) as requester:
            requester.ask(0)
            before = count_resident_bytes()
            for _ in range(20):
                stalled = stack.enter_context(Reader(zmq.DEALER, publisher.replay_endpoint, **NEVER_READS))
                stalled.socket.send_multipart([b"", pack_sequence(0)])
            wait_until(lambda: publisher.get_statistics().num_snapshots >= 21, "sent")
            assert read_resident_bytes() - before < 200 * MB  # of 20 times 30 MB


def test_subscriber_with_too_many_unread_bytes_is_dropped(caplog):
    """It used to hold 1.6 GB at 20 kB per batch."""
    with (
        make_publisher(max_unread_bytes=16 * MB, buffer_steps=10, linger_s=0.0) as publisher,
        Subscriber(publisher.endpoint) as subscriber,
        Subscriber(publisher.endpoint, **NEVER_READS),
    ):
        next_sequence = subscriber.wait_until_subscribed(publisher)
        publish_20_kb(publisher, 100)
        before = count_resident_bytes()
        for _ in range(50):
            publish_20_kb(publisher, 100)
            for _ in range(100):
                assert subscriber.receive()[0] == next_sequence
                next_sequence += 1
        assert publisher.get_statistics().num_readers_dropped >= 1
        wait_until(lambda: read_resident_bytes() - before < 40 * MB, "given back")
    dropped = [record for record in caplog.records if "disconnected" in record.message]
    assert 1 <= len(dropped) <= 4


def test_idle_publisher_frees_memory_of_a_closed_subscriber():
    with make_publisher(buffer_steps=10, linger_s=0.0) as publisher:
        with Subscriber(publisher.endpoint, **NEVER_READS) as stalled:
            stalled.wait_until_subscribed(publisher)
            publish_20_kb(publisher, 3_000)
            held = count_resident_bytes()
        wait_until(lambda: read_resident_bytes() < held - 40 * MB, "given back")


def test_connections_beyond_max_readers_are_refused_and_counted(caplog):
    with make_publisher(max_readers=3) as publisher, ExitStack() as stack:
        publish_20_kb(publisher, 1)
        host, port = publisher.replay_endpoint.removeprefix("tcp://").split(":")
        open_ones = [stack.enter_context(tcp.create_connection((host, int(port)))) for _ in range(3)]
        wait_until(lambda: publisher.get_statistics().num_readers == 3, "connected")
        for _ in range(20):
            refused = stack.enter_context(tcp.create_connection((host, int(port))))
            refused.settimeout(20)
            while refused.recv(100):
                pass
        wait_until(lambda: publisher.get_statistics().num_readers_refused == 20, "refused")
        for one in open_ones:
            one.close()
        with Requester(publisher.replay_endpoint) as requester:
            assert requester.ask_for_sequences(0) == [0]
    assert len([record for record in caplog.records if "refused" in record.message]) == 5


def test_only_connections_to_the_publisher_are_closed():
    """A descriptor that ZeroMQ reported may belong to another file later."""
    with zmq.Context() as context, tcp.create_server(("127.0.0.1", 0)) as other, ExitStack() as stack:
        connections = ReaderConnections(3)
        router = stack.enter_context(context.socket(zmq.ROUTER))
        connections.watch(router)
        router.bind("tcp://127.0.0.1:0")
        connections.add_address(router.LAST_ENDPOINT.decode())
        try:
            client = stack.enter_context(tcp.create_connection(other.getsockname()))
            accepted = stack.enter_context(other.accept()[0])
            left, right = (stack.enter_context(one) for one in tcp.socketpair())
            pipe = os.pipe()
            for descriptor in (client.fileno(), accepted.fileno(), left.fileno(), *pipe, -1, 10**6):
                assert not connections.cut(descriptor)
            accepted.sendall(b"x")
            left.sendall(b"y")
            os.write(pipe[1], b"z")
            assert client.recv(9) + right.recv(9) + os.read(pipe[0], 9) == b"xyz"
        finally:
            connections.stop()
            for descriptor in pipe:
                os.close(descriptor)


def test_reader_connections_without_thread_start_later_or_stop():
    connections = ReaderConnections(3)
    with no_new_threads(), pytest.raises(OutOfThreadsError, match="kv_pool event readers"):
        connections.start()
    connections.start()
    connections.stop()
    never_started = ReaderConnections(3)
    never_started.stop()
