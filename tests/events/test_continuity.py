"""All faults of a stream, without sockets: returned items, requests, reported losses.

A batch is written as incarnation and number: `a3` is sequence 3 of incarnation a. `S7` is a snapshot.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_pool import AllBlocksCleared, BlockRemoved
from kv_pool.events.batch import KVEventBatch, encode_batch
from kv_pool.events.continuity import Continuity, QueuedBatches, ReplayedBatches, make_fingerprint
from kv_pool.events.stream_items import BatchesLost, PublisherRestarted, PublisherSilent, ReceivedBatch


def payload_of(name, ts=None):
    """Return bytes that differ between incarnations; `S` begins with a clear."""
    sequence = int(name[1:])
    events = [AllBlocksCleared()] if name[0] in "ST" else [BlockRemoved([ord(name[0])], "GPU")]
    return encode_batch(KVEventBatch(float(sequence) if ts is None else ts, events, 0))


class Stream:
    """A `Continuity` with a fake clock; its items are rendered as short words."""

    def __init__(self, can_replay=True, **options):
        self.now = 100.0
        options = {"settle_s": None, **options}
        self.machine = Continuity(can_replay, self.now, **options)
        self.last_request = None

    def live(self, *names, ts=None):
        return self.words(
            item
            for name in names
            for item in self.machine.handle_live(int(name[1:]), payload_of(name, ts), self.now)
        )

    def replay(self, *names, ts=None):
        """Replay an answer; `end` is the end marker."""
        items = []
        for name in names:
            if name == "end":
                items += self.machine.handle_replay_end(self.now)
            else:
                items += self.machine.handle_replayed(int(name[1:]), payload_of(name, ts), self.now)
        return self.words(items)

    def wait(self, seconds):
        self.now += seconds
        return self.words(self.machine.handle_timers(self.now))

    def asked(self):
        """Return the start of the new request; None if there is none."""
        request = self.machine.request
        if request is None or request is self.last_request:
            return None
        self.last_request = request
        return request.start

    def words(self, items):
        return " ".join(self.word(item) for item in items)

    def word(self, item):
        match item:
            case ReceivedBatch():
                name = (
                    "S" if item.is_reset else chr(item.batch.events[0].block_hashes[0])
                ) + f"{item.sequence}"
                return name + ("r" if item.is_replayed else "")
            case BatchesLost(first, last, is_healed):
                return f"{'skipped' if is_healed else 'lost'}:{first}-{last}"
            case PublisherRestarted():
                return "restarted"
            case PublisherSilent(seconds):
                return f"silent:{seconds:g}"


def started(*names, ts=None, **options):
    """Return a stream that started with an answer of these batches."""
    stream = Stream(**options)
    assert stream.asked() == 0
    stream.machine.handle_connection(stream.now)
    stream.replay(*names, "end", ts=ts)
    assert stream.asked() is None
    return stream


# ---- the start -----------------------------------------------------------------------------------


def test_live_batches_wait_for_the_answer_and_are_returned_once():
    stream = Stream()
    assert stream.live("a1", "a2", "a3") == ""
    assert stream.replay("a0", "a1", "a2") == "a0r a1r a2r"
    assert stream.replay("end") == "a3"
    assert stream.machine.get_counts().num_duplicates == 2


def test_late_start_gets_the_remaining_batches():
    stream = Stream()
    assert stream.live("a9") == ""
    assert stream.replay("a6", "a7", "a8", "a9", "end") == "lost:0-5 a6r a7r a8r a9r"
    assert stream.machine.get_counts().num_lost == 6


def test_late_start_gets_a_snapshot():
    stream = Stream()
    assert stream.live("a8", "a9") == ""
    assert stream.replay("S8", ts=99.0) == "S8r"
    assert stream.replay("a9", "end") == "a9r"
    assert stream.live("a10") == "a10"
    counts = stream.machine.get_counts()
    assert (counts.num_lost, counts.num_skipped, counts.num_snapshots, counts.num_restarts) == (0, 0, 1, 0)


def test_lower_numbers_show_a_restart_after_a_snapshot():
    stream = started("S8", ts=99.0)
    assert stream.live("a8", ts=98.0) == ""
    assert stream.live("b0", ts=98.0) == "restarted b0"


def test_first_live_batch_triggers_the_first_request():
    """Batches sent between an answer and the subscription are lost, and may need a second snapshot."""
    stream = Stream(settle_s=0.25)
    assert stream.asked() is None
    stream.machine.handle_connection(stream.now)
    assert stream.asked() is None
    assert stream.live("a40") == ""
    assert stream.asked() == 0
    assert stream.live("a41") == ""
    assert stream.replay("S40", ts=99.0) == "S40r"
    assert stream.replay("a41", "end") == "a41r"
    assert stream.live("a42") == "a42"
    assert stream.machine.deadline is None


def test_first_request_is_sent_after_a_delay_without_batches():
    stream = Stream(settle_s=0.25)
    stream.machine.handle_connection(stream.now)
    assert stream.wait(0.2) == ""
    assert stream.asked() is None
    assert stream.wait(0.05) == ""
    assert stream.asked() == 0
    assert stream.replay("a0", "a1", "end") == "a0r a1r"
    assert not stream.machine.is_recovering


def test_live_batch_after_reconnection_does_not_end_the_delay():
    stream = Stream(settle_s=0.25)
    stream.machine.handle_connection(stream.now)
    stream.wait(0.25)
    assert stream.replay("a0", "end") == "a0r"
    stream.machine.handle_connection(stream.now)
    assert stream.live("a1", "b2") == ""
    assert stream.machine.request is None
    assert stream.wait(0.25) == ""
    assert stream.asked() == 0
    assert stream.replay("b0") == "restarted"
    assert stream.asked() == 0
    assert stream.replay("b0", "b1", "b2", "end") == "b0r b1r b2r"
    assert not stream.machine.is_recovering


def test_late_start_without_replay_is_no_loss():
    """Of a stream that is numbered from a clock, all numbers from 0 used to be lost."""
    stream = Stream(can_replay=False)
    assert stream.asked() is None
    assert stream.live("a5", "a6", "a8") == "a5 a6 lost:7-7 a8"


# ---- gaps ----------------------------------------------------------------------------------------


def test_hole_in_an_answer_is_filled_by_live_batches():
    """The publisher's buffer advanced while it answered with a snapshot."""
    stream = started("a0")
    stream.live("a2", "a3", "a4", "a5")
    assert stream.asked() == 0
    assert stream.replay("S3") == "skipped:1-2 S3r"
    assert stream.replay("a5") == "a4 a5r"
    assert stream.replay("end") == ""
    assert stream.asked() is None


def test_hole_in_two_answers_is_a_loss():
    """A batch that could not be encoded leaves a permanent hole."""
    stream = started("a0")
    stream.live("a4")
    stream.asked()
    assert stream.replay("a0", "a1", "a3") == "a1r"
    assert stream.asked() == 2
    assert stream.replay("a3", "a4", "end") == "lost:2-2 a3r a4r"


def test_hole_before_a_clear_is_healed():
    stream = started("a0")
    stream.live("a3")
    assert stream.replay("a0", "S2", "a3", "end") == "skipped:1-1 S2r a3r"


def test_answer_without_end_is_requested_again_where_it_stopped():
    stream = started("a0", replay_timeout_s=5)
    stream.live("a9")
    assert stream.asked() == 0
    stream.now += 4
    assert stream.replay("a0", "a1", "a2") == "a1r a2r"
    assert stream.wait(4) == ""
    assert stream.asked() is None
    assert stream.wait(1) == ""
    assert stream.asked() == 2
    assert stream.replay("a2", *[f"a{n}" for n in range(3, 10)], "end") == " ".join(
        f"a{n}r" for n in range(3, 10)
    )


def test_unanswered_request_is_abandoned():
    stream = started("a0", replay_timeout_s=5, max_attempts=3)
    stream.live("a4", "a5")
    for _ in range(2):
        assert stream.asked() == 0
        assert stream.wait(5) == ""
    assert stream.asked() == 0
    assert stream.wait(5) == "lost:1-3 a4 a5"
    assert stream.asked() is None
    assert stream.machine.get_counts().num_timeouts == 3
    # Further gaps are lost at once; the whole stream is requested after a pause.
    assert stream.live("a8", "a9", "a11") == "lost:6-7 a8 a9 lost:10-10 a11"
    assert stream.asked() is None
    assert stream.wait(5) == ""
    assert stream.asked() == 0
    assert stream.live("a13") == "lost:12-12 a13"


def test_queue_is_bounded_and_dropped_batches_are_requested():
    stream = Stream(max_queued=3)
    stream.asked()
    stream.live(*[f"a{n}" for n in range(1, 10)])
    assert stream.machine.num_queued == 3
    assert stream.replay("a0", "a1", "end") == "a0r a1r"
    assert stream.asked() == 1
    assert stream.machine.num_queued == 3
    assert stream.replay(*[f"a{n}" for n in range(1, 9)], "end") == (
        " ".join(f"a{n}r" for n in range(2, 9)) + " a9"
    )


# ---- unanswered requests -------------------------------------------------------------------------


def unanswered(*names, **options):
    """Return a stream that started with a0 and lost a1 to a3 after three unanswered requests."""
    stream = started("a0", replay_timeout_s=5, max_attempts=3, **options)
    stream.live("a4", *names)
    for _ in range(2):
        assert stream.wait(5) == ""
    assert stream.wait(5).startswith("lost:1-3 a4")
    stream.asked()
    return stream


def test_loss_from_unanswered_requests_is_healed_by_snapshot():
    stream = unanswered()
    assert stream.machine.is_incomplete
    assert stream.wait(5) == ""
    assert stream.asked() == 0
    assert stream.live("a5") == "a5"  # live batches do not wait
    assert stream.replay("S3", ts=99.0) == "S3r"
    assert stream.live("a6") == ""
    assert stream.replay("a4", "a5", "a6", "end") == "a4r a5r a6r"
    assert stream.live("a7") == "a7"
    assert not stream.machine.is_incomplete
    assert stream.machine.deadline is None
    assert stream.machine.get_counts().num_heals == 1


def test_snapshot_older_than_live_batches_leaves_no_gap():
    stream = unanswered("a5", "a6", "a7")
    stream.wait(5)
    assert stream.replay("S3", "a4", "end", ts=99.0) == "S3r a4r"
    assert stream.live("a8") == ""
    assert stream.asked() == 4
    assert stream.replay("a4", "a5", "a6", "a7", "a8", "end", ts=99.0) == "a5r a6r a7r a8r"


def test_batches_left_from_before_the_loss_are_read_again():
    stream = unanswered("a5", "a6")
    stream.wait(5)
    assert stream.replay("a2", "a3", "a4", "a5", "a6", "end") == "S2r a3r a4r a5r a6r"
    assert stream.live("a7") == "a7"
    assert not stream.machine.is_incomplete


def test_answer_without_older_batches_ends_healing():
    stream = unanswered("a5", "a6")
    stream.wait(5)
    assert stream.replay("a5", "a6", "end") == ""
    assert stream.live("a7") == "a7"
    assert not stream.machine.is_incomplete
    assert stream.machine.deadline is None
    assert stream.machine.get_counts().num_heals == 0


def test_healing_is_retried_with_growing_pauses():
    stream = unanswered()
    pauses = []
    while len(pauses) < 9:
        since = stream.now
        stream.now = stream.machine.deadline
        assert stream.wait(0) == ""
        if stream.asked() is None:
            continue
        pauses.append(stream.now - since)
        stream.wait(5)
        assert stream.machine.request is None
    assert pauses == [5, 5, 15, 35, 75, 155, 315, 315, 315]
    stream.now = stream.machine.deadline
    stream.wait(0)
    assert stream.replay("S4", "end", ts=99.0) == "S4r"
    assert not stream.machine.is_incomplete


def test_unanswered_first_request_is_healed():
    stream = Stream(replay_timeout_s=5, max_attempts=1)
    assert stream.wait(5) == ""
    assert stream.machine.is_incomplete
    assert stream.wait(5) == ""
    assert stream.replay("S7", "end") == "S7r"
    assert not stream.machine.is_incomplete


def test_reconnections_without_answers_cost_one_attempt_each():
    stream = unanswered()
    for number in (20, 40, 60):
        assert stream.words(stream.machine.handle_connection(stream.now)) == ""
        stream.asked()
        assert stream.live(f"a{number}") == ""
        assert stream.wait(5) == f"restarted lost:0-{number - 1} a{number}"
        assert stream.machine.request is None


def test_silence_without_answers_is_reported_without_a_probe():
    stream = unanswered(silence_after_s=2.0)
    assert stream.wait(2) == "silent:17"
    assert stream.live("a5") == "a5"


# ---- restarts ------------------------------------------------------------------------------------


def test_restart_is_detected_although_first_batches_were_missed():
    stream = started(*[f"a{n}" for n in range(8)])
    assert stream.live("b2", "b3") == "restarted"
    assert stream.asked() == 0
    assert stream.replay("b0", "b1", "b2", "b3", "end") == "b0r b1r b2r b3r"


def test_reconnection_replaces_the_request_and_drops_the_queue():
    stream = started("a0")
    stream.live("a2")
    assert stream.asked() == 0
    stream.machine.handle_connection(stream.now)
    assert stream.asked() == 0
    assert stream.replay("b0") == "restarted"
    assert stream.asked() == 0
    assert stream.replay("b0", "b1", "end") == "b0r b1r"
    assert stream.asked() is None


def test_unanswered_reconnection_counts_as_a_restart():
    stream = started("a0", "a1", replay_timeout_s=5, max_attempts=2)
    stream.machine.handle_connection(stream.now)
    assert stream.live("b2", "b3") == ""
    assert stream.wait(5) == ""
    assert stream.wait(5) == "restarted lost:0-1 b2 b3"
    assert stream.machine.request is None


def test_reconnection_after_a_snapshot_takes_another_snapshot():
    """No batch that identifies this incarnation is known yet."""
    stream = started("S8")
    stream.machine.handle_connection(stream.now)
    assert stream.asked() == 9
    assert stream.replay("a9") == "restarted"
    assert stream.asked() == 0
    assert stream.replay("S9", "end") == "skipped:0-8 S9r"


def test_live_batch_of_old_incarnation_is_skipped():
    stream = Stream()
    stream.live("a1", "b0")
    assert stream.replay("b0", "b1", "end") == "b0r b1r"
    assert stream.asked() is None
    assert stream.machine.get_counts().num_stale == 1


def test_restart_during_a_request_ends_in_new_incarnation():
    stream = started("a0", "a1")
    stream.live("a5", "b0", "b1")
    assert stream.asked() == 1
    assert stream.replay("b1") == "restarted"
    assert stream.asked() == 0
    words = stream.replay("b0", "b1", "end")
    assert words.startswith("b0r b1r")
    # a5 counts as a gap in the new incarnation, until the numbers decrease
    assert stream.asked() == 1
    assert stream.replay("b1", "end") == "lost:2-4 a5 restarted b0 b1"


# ---- silence -------------------------------------------------------------------------------------


def test_silent_publisher_is_probed_before_it_is_reported():
    stream = started("a0", silence_after_s=10, replay_timeout_s=5, max_attempts=2)
    assert stream.wait(9) == ""
    assert stream.wait(1) == ""
    assert stream.asked() == 0
    assert stream.replay("a0", "end") == ""  # a sign of life
    stream.wait(10)
    assert stream.asked() == 0
    assert stream.wait(5) == ""
    assert stream.asked() == 0
    assert stream.wait(5) == "silent:20"
    assert stream.machine.is_silent
    assert stream.machine.deadline is None
    assert stream.wait(1000) == ""
    assert stream.live("a1") == "a1"
    assert not stream.machine.is_silent


def test_silence_without_replay_is_reported_at_once():
    stream = Stream(can_replay=False, silence_after_s=10)
    assert stream.live("a0") == "a0"
    assert stream.machine.deadline == 110
    assert stream.wait(10) == "silent:10"
    assert stream.machine.get_counts().num_silences == 1


def test_live_batch_during_a_probe_ends_silence():
    stream = started("a0", silence_after_s=10, replay_timeout_s=5, max_attempts=1)
    stream.wait(10)
    stream.live("a1")
    assert stream.wait(5) == "a1"
    assert not stream.machine.is_silent


# ---- malformed batches ---------------------------------------------------------------------------


def test_malformed_batch_is_lost_and_the_stream_continues():
    stream = started("a0")
    items = stream.machine.handle_live(1, b"\xc1 rubbish", stream.now)
    assert stream.words(items) == "lost:1-1"
    assert stream.live("a2") == "a2"
    assert stream.machine.get_counts().num_malformed == 1


def test_malformed_batch_in_an_answer_is_counted_and_lost():
    stream = Stream()
    assert stream.replay("a0") == "a0r"
    assert stream.words(stream.machine.handle_replayed(1, b"", stream.now)) == "lost:1-1"
    assert stream.replay("a2", "end") == "a2r"


# ---- random streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_snapshots", [True, False])
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.sampled_from(
            ["send"] * 6 + ["drop"] * 3 + ["restart", "clock", "answer", "cut", "time", "connect"]
        ),
        max_size=60,
    ),
    capacity=st.integers(1, 8),
    settle_s=st.sampled_from([None, 1]),
)
def test_random_stream_is_complete_or_reports_its_losses(has_snapshots, steps, capacity, settle_s):
    """A publisher with a small buffer; a reader has all its numbers or was notified of the losses."""
    life, sequence, sent = 0, 0, []  # batches of this incarnation as (sequence, payload)
    stream = Stream(silence_after_s=10, settle_s=settle_s)
    machine = stream.machine
    machine.handle_connection(stream.now)
    held, is_whole = [], True

    def read(items):
        nonlocal held, is_whole
        for item in items:
            match item:
                case ReceivedBatch():
                    if item.is_reset:
                        held = list(item.batch.events[1].block_hashes)
                        is_whole = has_snapshots or item.sequence == 0
                    else:
                        held.extend(item.batch.events[0].block_hashes)
                case BatchesLost(is_healed=False):
                    is_whole = False
                case PublisherRestarted():
                    held, is_whole = [], True

    def encode(*events):
        nonlocal clock
        clock += 1
        return encode_batch(KVEventBatch(float(clock), list(events), 0))

    def number_of(life, one):
        return life * 10_000 + one % 1000

    def answer(whole):
        request = machine.request
        buffer = sent[-capacity:]
        kept = [one for one in buffer if one[0] >= request.start]
        is_gone = sequence > request.start and (not kept or kept[0][0] != request.start)
        if has_snapshots and is_gone:
            everything = [number_of(life, one) for one, _ in sent]
            snapshot = encode(AllBlocksCleared(), BlockRemoved(everything, "GPU"))
            kept = [(sequence - 1, snapshot)]
        for one, payload in kept if whole else kept[: len(kept) // 2]:
            if machine.request is not request:
                return
            read(machine.handle_replayed(one, payload, stream.now))
        if whole and machine.request is request:
            read(machine.handle_replay_end(stream.now))

    clock = 0
    for step in [*steps, "settle"]:
        stream.now += 0.01
        if step in ("send", "drop", "settle"):
            payload = encode(BlockRemoved([number_of(life, sequence)], "GPU"))
            sent.append((sequence, payload))
            if step != "drop":
                read(machine.handle_live(sequence, payload, stream.now))
            sequence += 1
        elif step in ("restart", "clock"):
            life += 1
            sequence = 0 if step == "restart" else sequence + 1000
            if step == "clock" and not has_snapshots:
                sequence = 0  # clock numbers need snapshots
            sent = []
            read(machine.handle_connection(stream.now))
        elif step in ("answer", "cut") and machine.request is not None:
            answer(step == "answer")
        elif step == "time" and machine.deadline is not None:
            stream.now = machine.deadline
            read(machine.handle_timers(stream.now))
        elif step == "connect":
            read(machine.handle_connection(stream.now))
    for _ in range(50):
        if machine.request is not None:
            answer(True)
        elif machine.is_recovering or machine.is_incomplete:
            stream.now = machine.deadline
            read(machine.handle_timers(stream.now))
        else:
            break
    assert machine.request is None
    assert machine.expected == sequence
    assert not machine.is_incomplete
    assert is_whole or not has_snapshots
    if is_whole:
        # No batch is missing, repeated or from a previous incarnation.
        assert held == [number_of(life, one) for one, _ in sent]
    else:
        assert not has_snapshots or not machine.can_replay or machine.get_counts().num_lost


# ---- queued and replayed batches ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_queued_batches_match_a_list(seed):
    rng = random.Random(seed)
    held, expected = QueuedBatches(max_batches=6, max_bytes=100), []
    for sequence in range(2000):
        match rng.choice(["append", "append", "append", "put_back", "pop", "clear"][: rng.randint(4, 6)]):
            case "append":
                payload = bytes(rng.choice([rng.randrange(60), rng.randrange(160)]))
                held.append(sequence, payload)
                expected.append((sequence, payload))
                while len(expected) > 6 or (sum(len(one) for _, one in expected) > 100 and len(expected) > 1):
                    expected.pop(0)
            case "put_back" if len(expected) < 6:
                held.put_back(sequence, b"back")
                expected.insert(0, (sequence, b"back"))
            case "pop" if expected:
                assert held.first == expected[0]
                assert held.pop() == expected.pop(0)
            case "clear" if rng.random() < 0.2:
                held.clear()
                expected.clear()
        assert len(held) == len(expected)
        assert held.num_bytes == sum(len(payload) for _, payload in expected)


def test_new_incarnation_forgets_all_batches():
    batches = ReplayedBatches()
    batches.add(3, make_fingerprint(b"three"))
    batches.passed = 5
    batches.last_live = 4
    batches.begin_incarnation()
    assert not batches.contains(3, b"three")
    assert batches.passed is None
    batches.passed = 4
    assert batches.contains(4, b"x")


def test_oldest_fingerprints_are_dropped():
    batches = ReplayedBatches()
    for sequence in range(100_001):
        batches.add(sequence, make_fingerprint(b"x"))
    assert (batches.contains(0, b"x"), batches.contains(1, b"x")) == (False, True)
