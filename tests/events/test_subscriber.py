"""The subscriber over loopback sockets, with kv_pool's publisher and a raw one that behaves as vLLM's."""

import asyncio
import errno
import random
import threading
import time

import msgspec
import pytest
import zmq
from events.followed_stream import (
    LIMIT_S,
    losses,
    our_publisher,
    read_to_the_end,
    read_until,
    subscribe,
    wait_until_sent,
)
from events.living_pool import LivingPool
from events.pool_map import pool_map
from events.wire_publisher import WirePublisher

from kv_pool import AllBlocksCleared, BlockStored, InvalidArgumentError
from kv_pool.errors import EndpointError, EventStreamError
from kv_pool.events.curve_keys import CurveKeys
from kv_pool.events.mirror import PrefixMirror, apply_item, follow, follow_async
from kv_pool.events.stream_items import BatchesLost, PublisherRestarted, PublisherSilent, ReceivedBatch
from kv_pool.events.subscriber import KVEventSubscriber


def sequences(items):
    return [item.sequence for item in items if isinstance(item, ReceivedBatch)]


def has(sequence):
    return lambda items: bool(items) and sequence in sequences(items)


def join(subscriber, publisher):
    """Publish until a live batch arrives: a ZeroMQ subscription takes a moment."""
    items = []
    while not any(isinstance(item, ReceivedBatch) and not item.is_replayed for item in items):
        publisher.publish([])
        items += subscriber.poll(0.05)
    if sequences(items)[-1] < publisher.sequence - 1:
        items += read_until(subscriber, has(publisher.sequence - 1))
    return items


# ---- a raw publisher that behaves as vLLM's ------------------------------------------------------


def test_earlier_batches_are_replayed_and_later_ones_live():
    with WirePublisher() as publisher:
        for _ in range(3):
            publisher.publish([])
        with subscribe(publisher) as subscriber:
            items = join(subscriber, publisher)
            assert sequences(items) == list(range(len(items)))
            assert [item.is_replayed for item in items[:3]] == [True] * 3
            assert subscriber.get_statistics().counts.num_lost == 0


def test_malformed_messages_are_unreadable():
    """The end marker counted as a live batch, and the next reconnection raised InvalidArgumentError."""
    number, end, payload = bytes(8), b"\xff" * 8, msgspec.msgpack.encode([0.0, [], 0])
    with KVEventSubscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as subscriber:
        for frames in ([b"", end, payload], [b"", number, b""], [b"", number[1:], payload], [b"", number]):
            subscriber._take_live(frames)
        for frames in ([b"x", end, b""], [b"", b"", payload], [b"", b""], [b"", b"", b"", end, b""]):
            subscriber._take_reply(frames)
        assert subscriber.get_statistics().num_unreadable == 8


def test_request_without_file_descriptors_is_sent_again(monkeypatch):
    def refuse(*arguments):
        raise zmq.ZMQError(errno.EMFILE)

    now = [0.0]
    with KVEventSubscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", clock=lambda: now[0]) as subscriber:
        now[0] = 6.0
        with monkeypatch.context() as patch:
            patch.setattr("zmq.Context.socket", refuse)
            with pytest.raises(EndpointError, match="Too many open files"):
                subscriber.poll()
        now[0] = 12.0
        assert subscriber.poll() == []
        assert subscriber._sockets._replay is not None


def test_message_beyond_the_size_limit_is_not_received():
    """A hostile publisher could make its readers allocate any amount of memory."""
    with WirePublisher() as publisher, subscribe(publisher, max_message_bytes=10_000) as subscriber:
        read = len(join(subscriber, publisher))
        publisher.publish(None, payload=bytes(20_000))
        read_until(subscriber, lambda _: subscriber.get_statistics().num_connections > 1)
        publisher.buffer.pop()
        publisher.buffer.append((read, b"\x93\xcb" + bytes(8) + b"\x90\x00"))
        items = read_until(subscriber, has(read))
        assert losses(items) == []


@pytest.mark.parametrize("name", ["max_message_bytes", "max_queued", "max_queued_bytes"])
def test_bound_below_one_is_rejected(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        KVEventSubscriber("tcp://127.0.0.1:1", **{name: 0})


def test_few_batches_are_decoded_ahead_of_the_reader():
    """A thousand batches used to be decoded ahead, whatever their size."""
    with WirePublisher() as publisher, subscribe(publisher) as subscriber:
        join(subscriber, publisher)
        for _ in range(300):
            publisher.publish([])
        read = [next(subscriber).sequence]
        publisher.publish([], is_dropped=True)
        publisher.publish([])
        most = len(subscriber._ready)
        while read[-1] < publisher.sequence - 1:
            read.append(next(subscriber).sequence)
            most = max(most, len(subscriber._ready))
        assert read == list(range(read[0], publisher.sequence))
        assert most <= 64


def test_restart_is_detected_and_read_from_its_start():
    first = WirePublisher()
    places = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint}
    with subscribe(first) as subscriber:
        join(subscriber, first)
        first.close()
        with WirePublisher(**places) as second:
            second.ts += 1000
            for _ in range(5):
                second.publish([])
            items = read_until(subscriber, has(4))
            assert PublisherRestarted() in items
            assert sequences(items) == [0, 1, 2, 3, 4]
            assert losses(items) == []
        assert subscriber.get_statistics().num_connections == 2


def test_malformed_messages_are_counted_and_not_fatal():
    with WirePublisher() as publisher, subscribe(publisher) as subscriber:
        read = len(join(subscriber, publisher))
        publisher.publish(None, payload=b"rubbish")
        publisher.publish([])
        items = read_until(subscriber, has(read + 1))
        assert items[0] == BatchesLost(read, read)
        assert subscriber.get_statistics().counts.num_malformed == 1


def test_silence_is_reported():
    with WirePublisher() as publisher:
        options = {"silence_after_s": 0.2, "replay_timeout_s": 0.1, "max_attempts": 1}
        with subscribe(publisher, **options) as subscriber:
            join(subscriber, publisher)
            publisher.ignores_requests = True
            items = read_until(subscriber, bool)
            assert isinstance(items[0], PublisherSilent)
            assert subscriber.get_statistics().is_silent
            publisher.publish([])
            read_until(subscriber, bool)
            assert not subscriber.get_statistics().is_silent


def test_topics_are_filtered():
    with WirePublisher() as publisher, KVEventSubscriber(publisher.endpoint, topic="kv@a") as subscriber:
        items = []
        while not items:
            publisher.publish([], topic=b"kv@b")
            publisher.publish([], topic=b"kv@a@model")
            items = subscriber.poll(0.05)
        # All are odd: the even ones have the other topic.
        assert {sequence % 2 for sequence in sequences(items)} == {1}


# ---- several publishers ---------------------------------------------------------------------------


class Pod:
    """A publisher that connects to its subscriber, as llm-d's engines do; its numbers start at 0."""

    def __init__(self, endpoint, topic="", rank=0):
        self.topic, self.rank, self.sequence = topic, rank, 0
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.connect(endpoint)

    def publish(self, *events):
        payload = msgspec.msgpack.encode([float(self.sequence), events, self.rank])
        self.socket.send_multipart([self.topic.encode(), self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def connect():
    """Return a function that makes a `Pod`."""
    pods = []

    def make(*options):
        pods.append(Pod(*options))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def bind(**options):
    return KVEventSubscriber("tcp://127.0.0.1:0", binds=True, **options)


def announce(pod, subscriber):
    """Publish until a batch of this pod arrives: the connection takes a moment."""
    while not any(item.source == (pod.topic, pod.rank) for item in subscriber.poll(0.05)):
        pod.publish()


def publish_until_error(pods, subscriber):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for pod in pods:
            pod.publish()
        subscriber.poll(0.05)


def store(block_hash):
    return BlockStored([block_hash], None, [1, 2, 3, 4], 4, None, "GPU", None)


@pytest.mark.parametrize(
    "places", [[("kv@a", 0), ("kv@b", 0)], [("", 0), ("", 1)], [("kv@a", 1), ("kv@b", 300)]]
)
def test_each_publisher_of_a_bound_subscriber_has_a_stream(connect, places):
    """Each batch was a restart, and the mirror forgot the blocks of the other publisher."""
    mirror, shared = PrefixMirror(), PrefixMirror()

    def note(item):
        apply_item(mirror, item, lambda source: f"{source.topic} {source.rank}")
        apply_item(shared, item, "all")

    with bind() as subscriber:
        pods = [connect(subscriber.endpoint, *place) for place in places]
        for pod in pods:
            announce(pod, subscriber)
        for number in range(5):
            for at, pod in enumerate(pods):
                pod.publish(store(100 * at + number))

        def are_all(_):
            return shared.count_blocks("all") == 10

        items = read_until(subscriber, are_all, note)
        assert {type(item) for item in items} == {ReceivedBatch}
        names = [f"{topic} {rank}" for topic, rank in places]
        assert [mirror.count_blocks(name) for name in names] == [5, 5]
        assert sorted(subscriber.get_statistics().publishers) == sorted(places)
        again = connect(subscriber.endpoint, *places[0])
        items = []
        while not any(item == PublisherRestarted() for item in items):
            again.sequence = 0
            again.publish()
            items += subscriber.poll(0.05)
        for item in items:
            note(item)
        assert [mirror.count_blocks(name) for name in names] == [0, 5]


def test_two_publishers_under_one_topic_and_rank_are_an_error(connect):
    with bind() as subscriber:
        pods = [connect(subscriber.endpoint, "kv@a"), connect(subscriber.endpoint, "kv@a")]
        with pytest.raises(EventStreamError, match=r"two publishers send under topic 'kv@a' and rank 0"):
            publish_until_error(pods, subscriber)


def test_second_publisher_beside_a_replay_endpoint_is_an_error(connect):
    with WirePublisher() as publisher, bind(replay_endpoint=publisher.replay_endpoint) as subscriber:
        pods = [connect(subscriber.endpoint, topic) for topic in ("kv@a", "kv@b")]
        with pytest.raises(EventStreamError, match=r"a second publisher \(topic 'kv@[ab]', rank 0\)"):
            publish_until_error(pods, subscriber)


def test_topics_behind_a_proxy_are_publishers_ranks_an_error():
    with WirePublisher() as publisher, KVEventSubscriber(publisher.endpoint) as subscriber:
        items = join(subscriber, publisher)
        for number in range(3):
            for topic in (b"kv@a", b"kv@b"):
                payload = msgspec.msgpack.encode([1.0, [], 0])
                publisher.live.send_multipart([topic, number.to_bytes(8, "big"), payload])
        items = read_until(subscriber, lambda items: len(items) == 6)
        assert [(item.source.topic, item.sequence) for item in items] == [
            (topic, number) for number in range(3) for topic in ("kv@a", "kv@b")
        ]
        payload = msgspec.msgpack.encode([1.0, [], 1])
        publisher.live.send_multipart([b"kv@a", bytes(8), payload])
        with pytest.raises(EventStreamError, match="ranks 0 and 1 send under the topic 'kv@a'"):
            read_until(subscriber, lambda _: False)


# ---- kv_pool's publisher -------------------------------------------------------------------------


def test_second_rank_queued_during_a_replay_is_an_error():
    """A fault: its batch was dropped, and the end of the replay was counted as unreadable."""
    with KVEventSubscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as subscriber:
        for rank in (0, 1):
            payload = msgspec.msgpack.encode([0.0, [], rank])
            subscriber._take_live([b"", rank.to_bytes(8, "big"), payload])
        with pytest.raises(EventStreamError, match="ranks 0 and 1 send under the topic"):
            subscriber._take_reply([b"", b"", b"\xff" * 8, b""])


@pytest.mark.parametrize("first_sequence", ["zero", "clock"])
def test_late_start_is_healed_by_one_snapshot(first_sequence):
    life = LivingPool()
    mirror = PrefixMirror(learns_tokens=True)
    with our_publisher(buffer_steps=5, first_sequence=first_sequence) as publisher:
        for _ in range(100):
            publisher.publish(life.step())
        wait_until_sent(publisher, 100)
        with subscribe(publisher) as subscriber:
            read_to_the_end(subscriber, publisher, 100, mirror)
            assert mirror.get_blocks("pool") == pool_map(life.pool)
            counts = subscriber.get_statistics().counts
            assert (counts.num_snapshots, counts.num_skipped, counts.num_lost) == (1, 0, 0)
        assert publisher.get_statistics().num_snapshots == 1


def test_stream_of_vllm_is_followed_by_counting_copies():
    """The publisher has no state: it announces each copy and replays only buffered batches."""
    life = LivingPool()
    mirror = PrefixMirror()
    with WirePublisher() as publisher:
        for number in range(300):
            payload = msgspec.msgpack.encode([float(number), life.step(), 0])
            publisher.publish(None, payload=payload, is_dropped=number % 50 == 7)
        with subscribe(publisher) as subscriber:
            read_until(subscriber, has(299), lambda item: apply_item(mirror, item, "pool"))
        assert mirror.get_blocks("pool") == pool_map(life.pool)


def test_loss_clears_the_publisher_in_the_mirror():
    life = LivingPool()
    mirror = PrefixMirror()
    with WirePublisher(buffer_steps=5) as publisher:
        for number in range(50):
            publisher.publish(None, payload=msgspec.msgpack.encode([float(number), life.step(), 0]))
        mirror.apply("pool", [AllBlocksCleared()])
        with subscribe(publisher) as subscriber:
            read_until(subscriber, has(49), lambda item: apply_item(mirror, item, "pool"))
    assert mirror.get_blocks("pool") <= pool_map(life.pool)


def test_encrypted_stream_requires_keys(tmp_path):
    import zmq.auth

    _, secret_file = zmq.auth.create_certificates(tmp_path, "server")
    server_public, _ = zmq.auth.load_certificate(secret_file)
    keys = CurveKeys(server_public, *zmq.curve_keypair())
    life = LivingPool()
    with our_publisher(curve_secret_key_file=secret_file) as publisher:
        publisher.publish(life.step())
        with subscribe(publisher, curve=keys) as subscriber:
            items = read_until(subscriber, has(0))
            assert len(items) == 1
        with subscribe(publisher) as stranger:
            assert stranger.poll(0.2) == []
            assert stranger.get_statistics().num_connections == 0


# ---- iterating and closing -----------------------------------------------------------------------


def test_for_loop_ends_when_another_thread_closes():
    with WirePublisher() as publisher:
        publisher.publish([])
        subscriber = subscribe(publisher)
        seen = []
        got_one = threading.Event()

        def loop():
            for item in follow(PrefixMirror(), subscriber, "one"):
                seen.append(item)
                got_one.set()

        thread = threading.Thread(target=loop)
        thread.start()
        assert got_one.wait(LIMIT_S)
        subscriber.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert sequences(seen) == [0]


def test_async_loop_reads_the_stream_and_ends_on_close():
    async def run():
        mirror = PrefixMirror()
        with WirePublisher() as publisher, subscribe(publisher) as subscriber:
            for _ in range(3):
                publisher.publish([])
            seen = []

            async def read():
                async for item in follow_async(mirror, subscriber, "one"):
                    seen.append(item)
                    if not item.is_replayed:
                        return

            async def publish():
                while True:
                    publisher.publish([])
                    await asyncio.sleep(0.01)

            publishing = asyncio.create_task(publish())
            await asyncio.wait_for(read(), LIMIT_S)
            publishing.cancel()
            assert sequences(seen) == list(range(len(seen)))
            assert mirror.get_counts("one").num_batches == len(seen)

            async def read_on():
                async for _ in subscriber:
                    pass

            reading = asyncio.create_task(read_on())
            await asyncio.sleep(0)
            subscriber.close()
            await asyncio.wait_for(reading, LIMIT_S)

    asyncio.run(run())


def test_closed_subscriber_returns_nothing():
    with WirePublisher() as publisher:
        subscriber = subscribe(publisher)
        subscriber.close()
        subscriber.close()
        assert list(subscriber) == []
        assert subscriber.poll(1) == []


def test_invalid_endpoint_or_key_is_rejected():
    with pytest.raises(InvalidArgumentError, match="tcp://host:port"):
        KVEventSubscriber("localhost:5557")
    with pytest.raises(EndpointError, match="cannot connect to tcp://"):
        KVEventSubscriber("tcp://127.0.0.1:*")
    with pytest.raises(InvalidArgumentError, match="40 bytes of Z85"):
        KVEventSubscriber("tcp://127.0.0.1:1", curve=CurveKeys(b"short", b"short", b"short"))


def test_mirror_heals_after_unanswered_replays():
    """It used to stay incomplete forever, although the publisher answered again."""
    life = LivingPool()
    mirror = PrefixMirror()

    def note(item):
        apply_item(mirror, item, "pool")

    with our_publisher() as publisher, WirePublisher() as unanswering:
        unanswering.ignores_requests = True
        publisher.publish(life.step())
        wait_until_sent(publisher, 1)  # without a subscriber: this batch is lost
        subscriber = KVEventSubscriber(
            publisher.endpoint, unanswering.replay_endpoint, replay_timeout_s=0.05, max_attempts=3
        )
        with subscriber:
            published = 1

            def has_lost(items):
                nonlocal published
                publisher.publish(life.step())
                published += 1
                return losses(items)

            read_until(subscriber, has_lost, note)
            assert subscriber.get_statistics().is_incomplete
            subscriber.replay_endpoint = publisher.replay_endpoint
            subscriber._machine.replay_timeout_s = LIMIT_S  # the answer may be slow on a busy machine
            wait_until_sent(publisher, published)
            read_until(subscriber, lambda _: not subscriber.get_statistics().is_incomplete, note)
            read_to_the_end(subscriber, publisher, published, mirror)
            assert mirror.get_blocks("pool") == pool_map(life.pool)
            assert subscriber.get_statistics().counts.num_heals == 1


def test_snapshot_beyond_the_size_limit_is_a_reported_loss():
    options = {"max_message_bytes": 5_000, "replay_timeout_s": 0.05, "max_attempts": 2}
    with WirePublisher() as publisher:
        publisher.publish(None, payload=bytes(20_000), is_dropped=True)
        publisher.publish([])
        with subscribe(publisher, **options) as subscriber:
            read_until(subscriber, lambda _: subscriber.get_statistics().is_incomplete)
            assert subscriber.get_statistics().counts.num_batches == 0


@pytest.mark.slow
@pytest.mark.parametrize("first_sequence", ["zero", "clock"])
def test_mirror_matches_the_pool_after_drops_and_restarts(first_sequence):
    """A subscriber with a small queue and a publisher are killed and restarted."""
    rng = random.Random(first_sequence)
    life = LivingPool()
    mirror = PrefixMirror(learns_tokens=True)
    options = {"buffer_steps": 20, "first_sequence": first_sequence}
    publisher = our_publisher(**options)
    places = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    subscriber = subscribe(publisher)
    num_published = 0
    num_snapshots = 0
    for fault in range(1, 9):
        for _ in range(rng.randrange(1, 60)):
            publisher.publish(life.step())
            num_published += 1
        read_to_the_end(subscriber, publisher, num_published, mirror)
        assert mirror.get_blocks("pool") == pool_map(life.pool)
        if rng.random() < 0.5:
            num_snapshots += subscriber.get_statistics().counts.num_snapshots
            subscriber.close()
            subscriber = subscribe(publisher)
            mirror.clear_publisher("pool")
        else:
            publisher.close()
            life = LivingPool(seed=fault)
            publisher = our_publisher(**options, **places)
            num_published = 0
    publisher.publish(life.step())
    read_to_the_end(subscriber, publisher, num_published + 1, mirror)
    assert mirror.get_blocks("pool") == pool_map(life.pool)
    assert num_snapshots + subscriber.get_statistics().counts.num_snapshots <= 1 + fault
    subscriber.close()
    publisher.close()
