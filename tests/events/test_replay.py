"""Answers to readers that missed batches, on real sockets."""

import pytest
import zmq
from events.deadlines import wait_until
from events.made_publisher import make_publisher
from events.stream_readers import Reader, Requester, numbers_of, removed

from kv_pool.core.kv_events import AllBlocksCleared, BlockStored
from kv_pool.events import replay_server
from kv_pool.events.batch import END_OF_REPLAY, decode_batch, pack_sequence
from kv_pool.events.invariants import Reader as StreamReader
from kv_pool.events.replay_server import MAX_WAITING_REQUESTS
from kv_pool.events.stream_state import StreamState


def stored(block_hash, parent=None):
    return BlockStored([block_hash], parent, [block_hash] * 2, 2, None, "GPU", None)


def publish_numbers(publisher, numbers):
    for number in numbers:
        publisher.publish([removed(number)])


def resident_after(batches):
    """Return the hashes that a reader of these batches knows."""
    reader = StreamReader()
    for _, batch in batches:
        reader.read(batch.events)
    return {block_hash for _, block_hash in reader.known}


@pytest.fixture
def publisher():
    """A publisher of batches 0 to 7, with 3 to 7 in its buffer."""
    with make_publisher(buffer_steps=5, topic="t") as publisher:
        publish_numbers(publisher, range(8))
        with Requester(publisher.replay_endpoint) as requester:
            requester.ask_until(0, 7)
        yield publisher


@pytest.mark.parametrize(
    ("start", "sequences"),
    [
        (0, [3, 4, 5, 6, 7]),
        (2, [3, 4, 5, 6, 7]),
        (3, [3, 4, 5, 6, 7]),
        (5, [5, 6, 7]),
        (7, [7]),
        (8, []),
        (2**64 - 2, []),
    ],
)
def test_reader_gets_buffered_batches_from_requested_sequence(publisher, start, sequences):
    with Requester(publisher.replay_endpoint) as requester:
        answer = requester.ask(start)
    assert [sequence for sequence, _ in answer] == sequences
    assert [numbers_of(batch) for _, batch in answer] == [[sequence] for sequence in sequences]


def test_replay_has_the_documented_frames(publisher):
    with Requester(publisher.replay_endpoint) as requester:
        requester.request(7)
        empty, topic, sequence, payload = requester.receive_frames()
        end = requester.receive_frames()
    assert (empty, topic, sequence) == (b"", b"t", pack_sequence(7))
    assert numbers_of(decode_batch(payload)) == [7]
    assert end == [b"", b"", END_OF_REPLAY, b""]


def test_all_queued_requests_are_answered(publisher):
    with Requester(publisher.replay_endpoint) as requester:
        for start in (3, 5, 9):
            requester.request(start)
        answers = [[sequence for sequence, _ in requester.receive_answer()] for _ in range(3)]
    assert answers == [[3, 4, 5, 6, 7], [5, 6, 7], []]


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [pack_sequence(0)],
        [b"", b""],
        [b"", b"\0" * 7],
        [b"", b"\0" * 9],
        [b"not empty", pack_sequence(0)],
        [b"", pack_sequence(0), b""],
        [b""] * 5_000,
    ],
    ids=lambda frames: f"{len(frames)} frames, last {frames[-1]!r}",
)
def test_malformed_request_is_counted_and_ignored(publisher, frames):
    with Requester(publisher.replay_endpoint) as requester:
        requester.socket.send_multipart(frames)
        assert requester.ask_for_sequences(7) == [7]
    assert publisher.get_statistics().num_malformed_requests == 1


def test_oversized_frame_disconnects_only_its_sender(publisher):
    with Requester(publisher.replay_endpoint) as requester, Requester(publisher.replay_endpoint) as greedy:
        greedy.socket.send_multipart([b"", b"\0" * 100_000])
        assert requester.ask_for_sequences(7) == [7]


def test_close_returns_if_the_replay_thread_has_ended():
    """`close()` used to wait forever if a request woke the thread, which then saw the stop flag."""
    with make_publisher() as publisher, Requester(publisher.replay_endpoint) as requester:
        server = publisher._replay_server
        server._is_stopping = True
        requester.request(0)
        server._thread.join(20)
        assert not server._thread.is_alive()


# ---- snapshots ---------------------------------------------------------------------------------------


def test_reader_in_time_gets_a_replay_although_there_is_a_state():
    with (
        make_publisher(StreamState(), buffer_steps=3) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        publish_numbers(publisher, range(5))
        requester.ask_until(0, 4)
        assert requester.ask_for_sequences(2) == [2, 3, 4]
        assert requester.ask_for_sequences(5) == []
        assert requester.ask_for_sequences(1) == [1, 2, 3, 4]  # the first is a snapshot


def test_snapshot_includes_the_number_of_a_rejected_batch():
    state = StreamState()
    with (
        make_publisher(state, buffer_steps=2) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        for number in range(4):
            publisher.publish([stored(number)])
        publisher.publish([stored(4), object()])
        wait_until(lambda: publisher.get_statistics().last_sequence == 4, "rejected")
        assert publisher._replay_server.buffer.last_sequence == 4
        assert requester.ask_for_sequences(0) == [0, 1, 2, 3, 4]
        assert requester.ask_for_sequences(1) == [1, 2, 3, 4]
        assert state.take_snapshot()[0] == 4  # with a lower number, no two readers would share one


def test_hole_is_filled_by_a_snapshot():
    with make_publisher(StreamState()) as publisher, Requester(publisher.replay_endpoint) as requester:
        publisher.publish([stored(1)])
        publisher.publish([stored(2), object()])
        publisher.publish([stored(3)])
        batches = requester.ask_until(0, 2)
        assert [sequence for sequence, _ in batches] == [0, 1, 2]
        answer = requester.ask(1)
        assert [sequence for sequence, _ in answer] == [1, 2]
        # The content of the lost batch is unknown, so no earlier block is kept.
        assert resident_after(answer) == {3}
        assert resident_after(batches) == {3}


def test_readers_clear_after_a_restart_with_clock_numbers():
    with (
        make_publisher(StreamState(), first_sequence="clock") as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        ((sequence, snapshot),) = requester.ask(17)
        assert snapshot.events == [AllBlocksCleared()]
        assert sequence == 1700000000500000 - 1
        publisher.publish([stored(1)])
        requester.ask_until(sequence + 1, sequence + 1)


def test_snapshot_has_requested_number_up_to_the_fill_bound(monkeypatch):
    monkeypatch.setattr(replay_server, "MAX_FILLED", 50)
    with (
        make_publisher(StreamState(), first_sequence=100) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        answer = requester.ask(50)
        assert [sequence for sequence, _ in answer] == list(range(50, 100))
        assert [bool(batch.events) for _, batch in answer] == [True] + [False] * 49
        ((sequence, snapshot),) = requester.ask(49)
        assert (sequence, snapshot.events) == (99, [AllBlocksCleared()])


def test_snapshots_stay_valid_across_heartbeats():
    with (
        make_publisher(StreamState(), heartbeat_s=0.001, buffer_steps=2) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        publisher.publish([stored(1)])
        while publisher.get_statistics().num_empty_batches_sent < 10:
            answer = requester.ask(0)
        assert resident_after(answer) <= {1}
        answer = requester.ask(0)
        assert resident_after(answer) == {1}
        sequences = [sequence for sequence, _ in answer]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def test_answer_ends_if_buffer_does_not_continue_its_snapshot():
    """Dynamo's indexer used to continue after the gap, without the batches in it."""

    class Busy(StreamState):
        """A state that sends four more batches while the first snapshot is taken."""

        def iter_snapshot(self, yield_timer=None):
            snapshot = super().iter_snapshot()
            if self.last_sequence == 2:
                for number in range(4, 8):
                    publisher.publish([stored(number)])
                wait_until(lambda: publisher.get_statistics().num_batches_sent == 7, "sent")
            return snapshot

    with (
        make_publisher(Busy(), buffer_steps=2) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        for number in range(1, 4):
            publisher.publish([stored(number)])
        wait_until(lambda: publisher.get_statistics().num_batches_sent == 3, "sent")
        assert requester.ask_for_sequences(0) == [0, 1, 2]
        assert requester.ask_for_sequences(3) == [3, 4, 5, 6]


def test_reader_with_an_unread_snapshot_gets_no_second_one():
    with (
        make_publisher(
            StreamState(), buffer_steps=1, linger_s=0.0, first_sequence="clock", slow_reader_s=100.0
        ) as publisher,
        Requester(publisher.replay_endpoint) as requester,
        Reader(zmq.DEALER, publisher.replay_endpoint, rcvhwm=1, rcvbuf=4096) as stalled,
    ):
        tokens = [2**31] * 2_000_000
        publisher.publish([BlockStored([1], None, tokens, len(tokens), None, "GPU", None)])
        publisher.publish([stored(2)])
        last = 1700000000500001
        # A request before that would get another snapshot.
        wait_until(lambda: publisher.get_statistics().last_sequence == last, "published")
        assert requester.ask_for_sequences(0) == [last]
        stalled.socket.send_multipart([b"", pack_sequence(0)])
        wait_until(lambda: publisher.get_statistics().num_snapshots == 2, "sent to both")
        for _ in range(MAX_WAITING_REQUESTS + 2):
            stalled.socket.send_multipart([b"", pack_sequence(0)])
        while publisher.get_statistics().num_replays_abandoned < 2:
            assert requester.ask_for_sequences(last) == [last]
        assert requester.ask_for_sequences(last) == [last]
        assert publisher.get_statistics().num_snapshots == 2
        # The first snapshot, and the one shared by the readers that waited.
        sequences = [stalled.receive_frames()[2] for _ in range(2 * MAX_WAITING_REQUESTS + 2)]
        assert sequences == [pack_sequence(last), END_OF_REPLAY] * (MAX_WAITING_REQUESTS + 1)


def test_failing_state_costs_readers_only_the_snapshot():
    class Forgetful(StreamState):
        def iter_snapshot(self, yield_timer=None):
            raise RuntimeError("forgotten")

    with (
        make_publisher(Forgetful(), buffer_steps=2) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        publish_numbers(publisher, range(5))
        requester.ask_until(0, 4)
        assert requester.ask_for_sequences(0) == [3, 4]
    assert publisher.get_statistics().num_snapshots == 0
