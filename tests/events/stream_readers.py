"""Readers of a publisher on real sockets: a SUB for live batches, a DEALER for missed ones."""

import time
from contextlib import contextmanager

import zmq

from kv_pool.core.kv_events import BlockRemoved
from kv_pool.events.batch import END_OF_REPLAY, decode_batch, pack_sequence, unpack_sequence

TIMEOUT_MS = 20_000
"""Time after which a broken test fails; passing tests wait less."""


def removed(number):
    return BlockRemoved([number], "GPU")


def numbers_of(batch):
    """Return the hashes that a batch removes, in order."""
    return [block_hash for event in batch.events for block_hash in event.block_hashes]


class Reader:
    def __init__(self, kind, endpoint, **options):
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def receive_frames(self):
        assert self.socket.poll(TIMEOUT_MS), "nothing came"
        return self.socket.recv_multipart()

    def close(self):
        self.context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


class Subscriber(Reader):
    """A SUB socket."""

    def __init__(self, endpoint, topic=b"", **options):
        super().__init__(zmq.SUB, endpoint, **{"rcvhwm": 0, **options})
        self.socket.subscribe(topic)

    def receive(self):
        """Return the next live batch as (sequence, batch)."""
        _, sequence, payload = self.receive_frames()
        return unpack_sequence(sequence), decode_batch(payload)

    def receive_numbers(self):
        """Return the sequence of the next live batch that is not empty, and the hashes it removes."""
        while True:
            sequence, batch = self.receive()
            if batch.events:
                return sequence, numbers_of(batch)

    def wait_until_subscribed(self, publisher):
        """Publish on a new publisher until a batch arrives; return the next sequence."""
        publisher.publish([removed(0)])
        num_published = 1
        while not self.socket.poll(10):
            publisher.publish([removed(0)])
            num_published += 1
        while self.receive()[0] != num_published - 1:
            pass
        return num_published


class Requester(Reader):
    """A DEALER socket for replays."""

    def __init__(self, endpoint, **options):
        super().__init__(zmq.DEALER, endpoint, rcvhwm=0, **options)

    def request(self, start):
        self.socket.send_multipart([b"", pack_sequence(start)])

    def receive_answer(self):
        """Return (sequence, batch) of each reply up to the end marker."""
        answer = []
        while True:
            empty, _, sequence, payload = self.receive_frames()
            assert empty == b""
            if sequence == END_OF_REPLAY:
                assert payload == b""
                return answer
            answer.append((unpack_sequence(sequence), decode_batch(payload)))

    def ask(self, start):
        self.request(start)
        return self.receive_answer()

    def ask_until(self, start, last):
        """Repeat the request until the newest batch has the sequence `last`."""
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while True:
            answer = self.ask(start)
            if answer and answer[-1][0] == last:
                return answer
            assert time.monotonic() < deadline_s, answer

    def ask_for_sequences(self, start):
        return [sequence for sequence, _ in self.ask(start)]


@contextmanager
def subscribed(publisher, **options):
    """Return a subscriber that receives everything published from now on, and the next sequence."""
    with Subscriber(publisher.endpoint, **options) as subscriber:
        yield subscriber, subscriber.wait_until_subscribed(publisher)
