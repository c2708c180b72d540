"""The events that a state sends instead of a pool's, in the notation of made_events.py."""

import pytest
from events.made_events import draw, removed, stored

from kv_pool.core.kv_events import BlockReported
from kv_pool.events.stream_state import StreamState


def send(state, *events):
    return draw(state.apply(list(events)))


def test_only_new_blocks_of_a_store_are_sent():
    state = StreamState()
    state.apply([stored([2])])
    extra_keys = [("a",), ("b",), None, ("d",)]
    sent = state.apply([stored([1, 2, 3, 4], parent=9, extra_keys=extra_keys)])
    assert draw(sent) == ["9 > 1", "2 > 3 4"]
    assert [event.token_ids for event in sent] == [[10, 11], [30, 31, 40, 41]]
    assert [event.extra_keys for event in sent] == [[("a",)], [None, ("d",)]]


def test_report_that_is_sent_is_not_counted_as_a_copy():
    state = StreamState(exact=False)
    assert send(state, stored([1], event_class=BlockReported)) == ["> 1"]
    assert len(state.resident) == 0


def test_consecutive_removals_from_one_place_are_merged():
    state = StreamState(exact=False)
    events = [
        removed(1),
        removed(2),
        removed(3, group_idx=1),
        removed(4, group_idx=1, locality="LOCAL"),
        removed(5, group_idx=1, locality="LOCAL"),
        stored([9]),
        removed(6),
        removed(7),
        removed(6),
    ]
    assert send(state, *events) == ["- 1 2", "- 3", "- 4 5", "> 9", "- 6 7", "- 6"]
    assert [event.block_hashes for event in events[:2]] == [[1], [2]], "what was given is as it was"


def test_dropped_events_do_not_separate_removals():
    state = StreamState()
    state.apply([stored([1, 2, 3]), stored([3])])
    assert send(state, removed(1), removed(3), stored([3]), removed(2)) == ["- 1 2"]


def test_span_with_holes_is_sent_without_tokens():
    (sent,) = StreamState().apply([stored([1, 2], token_ids=list(range(8)))])
    assert (sent.block_hashes, sent.token_ids) == ([1, 2], [])


def test_empty_store_is_not_sent():
    assert send(StreamState(exact=False), stored([], token_ids=[1, 2])) == []


@pytest.mark.parametrize(
    ("hashes", "parent", "expected"),
    [
        ([1, 2, 2, 3], None, ["> 1 2", "1 > 2 3"]),
        ([1, 2, 1, 3], 8, ["8 > 1 2", "8 > 1 3"]),
        ([1, 2, 1, 2], None, ["> 1 2", "> 1 2"]),
        ([1, 2], 1, ["> 1 2"]),
        ([1, 1, 1], 1, ["> 1", "> 1", "> 1"]),
    ],
)
def test_dense_store_has_no_repeated_hash_or_own_parent(hashes, parent, expected):
    sent = StreamState(exact=False).apply([stored(hashes, parent)])
    assert draw(sent) == expected
    assert [token for event in sent for token in event.token_ids] == stored(hashes).token_ids


def test_repeated_hash_in_an_exact_store_is_a_second_copy():
    state = StreamState()
    assert send(state, stored([1, 2, 2, 3], 1)) == ["> 1 2", "2 > 3"]
    assert send(state, removed(2)) == []
