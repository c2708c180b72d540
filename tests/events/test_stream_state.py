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


def test_consecutive_removals_from_one_place_are_merged():
    state = StreamState()
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
    assert send(state, *events) == ["- 1 2", "- 3", "- 4 5", "> 9", "- 6 7"]
    assert [event.block_hashes for event in events[:2]] == [[1], [2]], "what was given is as it was"


def test_span_with_holes_is_sent_without_tokens():
    (sent,) = StreamState().apply([stored([1, 2], token_ids=list(range(8)))])
    assert (sent.block_hashes, sent.token_ids) == ([1, 2], [])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (stored([], token_ids=[1, 2]), []),
        (stored([1], event_class=BlockReported), []),
        (stored([1, 2], 1), ["> 1 2"]),
        (stored([1, 1, 1], 1), ["> 1"]),
        (stored([1, 2, 2, 3], 1), ["> 1 2", "2 > 3"]),
        (stored([1, 2, 1, 3], 8), ["8 > 1 2", "1 > 3"]),
        (removed(7, 8, 7), ["- 7 8"]),
    ],
)
def test_no_sent_event_is_empty_or_has_a_hash_twice(event, expected):
    assert send(StreamState(), event) == expected


def test_repeated_hash_in_a_store_is_a_second_copy():
    state = StreamState()
    assert send(state, stored([1, 2, 2, 3], 1)) == ["> 1 2", "2 > 3"]
    assert send(state, removed(2)) == []
