"""Recognizing live batches that were replayed."""

from kv_pool.events.queued_batches import ReplayedBatches, make_fingerprint


def replayed(**payloads):
    batches = ReplayedBatches()
    for name, payload in payloads.items():
        batches.add(int(name[1:]), make_fingerprint(payload))
    return batches


def test_numbers_in_a_snapshot_are_known_whatever_their_bytes():
    batches = ReplayedBatches()
    batches.passed = 5
    assert (batches.contains(5, b"x"), batches.contains(6, b"x")) == (True, False)


def test_number_up_to_the_last_live_one_is_not_known():
    batches = ReplayedBatches()
    batches.passed = 5
    batches.last_live = 4
    assert (batches.contains(4, b"x"), batches.contains(5, b"x")) == (False, True)


def test_new_incarnation_forgets_all_batches():
    batches = replayed(s3=b"three")
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
