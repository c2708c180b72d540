"""Which live batches are known from answers."""

from kv_pool.events.replayed_batches import ReplayedBatches, make_fingerprint


def replayed(**payloads):
    batches = ReplayedBatches()
    for name, payload in payloads.items():
        batches.add(int(name[1:]), make_fingerprint(payload))
    return batches


def test_a_live_batch_with_the_bytes_of_a_replayed_one_is_known():
    batches = replayed(s3=b"three")
    assert batches.have(3, b"three")
    assert not batches.have(3, b"another")
    assert not batches.have(4, b"three")


def test_only_another_batch_under_the_same_number_contradicts():
    batches = replayed(s3=b"three")
    assert batches.contradict(3, b"another")
    assert not batches.contradict(3, b"three")
    assert not batches.contradict(4, b"another")


def test_numbers_that_a_snapshot_has_are_known_whatever_their_bytes():
    batches = ReplayedBatches()
    batches.pass_to(5)
    assert (batches.have(5, b"x"), batches.have(6, b"x")) == (True, False)


def test_a_number_that_did_not_grow_over_a_connection_was_not_sent_before():
    batches = ReplayedBatches()
    batches.pass_to(5)
    batches.note_live(4)
    assert (batches.have(4, b"x"), batches.have(5, b"x")) == (False, True)


def test_a_new_life_forgets_all():
    batches = replayed(s3=b"three")
    batches.pass_to(5)
    batches.note_live(4)
    batches.begin_new_life()
    assert not batches.have(3, b"three")
    assert batches.passed is None
    batches.pass_to(4)
    assert batches.have(4, b"x")


def test_the_oldest_fingerprints_are_dropped():
    batches = ReplayedBatches()
    for sequence in range(100_001):
        batches.add(sequence, make_fingerprint(b"x"))
    assert (batches.have(0, b"x"), batches.have(1, b"x")) == (False, True)
