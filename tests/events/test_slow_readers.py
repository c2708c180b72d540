"""The cost of slow readers, on real sockets."""

import os
from contextlib import ExitStack
from pathlib import Path

import zmq
from events.deadlines import wait_until
from events.made_publisher import make_publisher
from events.stream_readers import Reader, Requester, Subscriber, removed

from kv_pool.core.kv_events import BlockStored
from kv_pool.events.batch import pack_sequence
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


def read_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_unread_replays_use_bounded_memory(caplog):
    """Each request of a connection that did not read used to hold the memory of the whole buffer."""
    with (
        make_publisher(buffer_steps=400, linger_s=0.0, slow_reader_s=1.0) as publisher,
        ExitStack() as stack,
    ):
        publish_20_kb(publisher, 400)
        before = read_resident_bytes()
        for _ in range(40):
            stalled = stack.enter_context(Reader(zmq.DEALER, publisher.replay_endpoint, **NEVER_READS))
            for _ in range(3):
                stalled.socket.send_multipart([b"", pack_sequence(0)])
        peak = 0

        def are_abandoned():
            nonlocal peak
            peak = max(peak, read_resident_bytes())
            return publisher.get_statistics().num_replays_abandoned >= 40

        wait_until(are_abandoned, "abandoned")
        assert peak - before < 64 * MB  # of 3 times 40 times 8 MB
        with Requester(publisher.replay_endpoint) as requester:
            requester.request(0)
            for number in range(400):
                assert requester.receive_frames()[2] == pack_sequence(number)
    assert len([record for record in caplog.records if "replays" in record.message]) <= 8


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
            before = read_resident_bytes()
            for _ in range(20):
                stalled = stack.enter_context(Reader(zmq.DEALER, publisher.replay_endpoint, **NEVER_READS))
                stalled.socket.send_multipart([b"", pack_sequence(0)])
            wait_until(lambda: publisher.get_statistics().num_snapshots >= 21, "sent")
            assert read_resident_bytes() - before < 200 * MB  # of 20 times 30 MB


def test_stuck_subscribers_use_bounded_memory_and_are_closed():
    """They would hold 60 MB without a high-water mark, and hold it for ever without a time limit."""
    with (
        make_publisher(hwm=1_000, buffer_steps=10, linger_s=0.0, slow_reader_s=1.0) as publisher,
        Subscriber(publisher.endpoint) as subscriber,
        ExitStack() as stack,
    ):
        next_sequence = subscriber.wait_until_subscribed(publisher)
        many = [stack.enter_context(Subscriber(publisher.endpoint, **NEVER_READS)) for _ in range(50)]
        for stalled in many:
            while not stalled.socket.poll(10):
                publisher.publish([removed(0)])
        before = read_resident_bytes()
        for _ in range(30):
            publish_20_kb(publisher, 100)
            last = publisher.get_statistics().last_sequence
            sequences = [subscriber.receive()[0] for _ in range(next_sequence, last + 1)]
            assert sequences == list(range(next_sequence, last + 1))
            next_sequence = last + 1
        assert read_resident_bytes() - before < 50 * MB

        wait_until(lambda: count_connections(publisher.endpoint) == 1, "closed")


def count_connections(endpoint):
    """Return the established connections at the publisher's end."""
    port = int(endpoint.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
