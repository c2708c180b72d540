"""The events that a state sends instead of a pool's, in the notation of made_events.py."""

from types import SimpleNamespace

import msgspec
import pytest
from events.made_events import draw, removed, send, stored

from kv_pool import AllBlocksCleared, InvalidTypeError
from kv_pool.core.kv_events import BlockReported
from kv_pool.events.stream_state import StreamState, adopt


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


# ---- events of an engine's own classes -------------------------------------------------------------


def make_foreign(event, *left_out, name=None, **more):
    """Return the same event as a struct of another class with that name, as an engine defines it."""
    kind = type(event)
    fields = [field for field in kind.__struct_fields__ if field not in left_out]
    foreign = msgspec.defstruct(name or kind.__name__, [*fields, *more])
    return foreign(**{field: getattr(event, field) for field in fields}, **more)


EVENTS = [
    stored([1, 2], 7, lora_name="a", extra_keys=[None, ("salt",)], session_id="s-1"),
    removed(1, 2, locality="LOCAL"),
    AllBlocksCleared(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_of_an_engine_is_converted(event):
    assert adopt(make_foreign(event)) == event
    assert adopt(make_foreign(event, news=1)) == event
    subclass = msgspec.defstruct("Subclass", [], bases=(type(event),))
    assert adopt(subclass(*msgspec.structs.astuple(event))) == event
    assert adopt(event) is event


def test_fields_missing_in_an_older_engine_are_unset():
    event = stored([1])
    assert adopt(make_foreign(event, "session_id", "lookahead_token_ids", "ownership")) == event


def test_report_of_an_engine_is_converted_to_a_report():
    adopted = adopt(make_foreign(stored([1], event_class=BlockReported)))
    assert type(adopted) is BlockReported


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"type": "BlockStored"}, "a dict cannot be sent"),
        (SimpleNamespace(block_hashes=[1]), "a SimpleNamespace cannot be sent"),
        (make_foreign(stored([1]), "token_ids"), "a BlockStored cannot be sent: .*token_ids"),
    ],
)
def test_object_that_is_not_an_event_is_rejected_without_change(event, message):
    state = StreamState()
    with pytest.raises(InvalidTypeError, match=message):
        state.apply([stored([1]), event])
    assert len(state.resident) == 0


def test_state_counts_own_and_foreign_events_together():
    state = StreamState()
    assert draw(state.apply([make_foreign(stored([1])), stored([1])])) == ["> 1"]
    assert draw(state.apply([removed(1), make_foreign(removed(1))])) == ["- 1"]
