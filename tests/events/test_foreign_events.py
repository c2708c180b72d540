"""Events of an engine's own classes."""

from types import SimpleNamespace

import msgspec
import pytest
from events.made_events import draw, removed, stored

from kv_pool import AllBlocksCleared, InvalidTypeError
from kv_pool.core import kv_events
from kv_pool.events.stream_state import StreamState, adopt


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
    assert adopt(event) is event


def test_fields_missing_in_an_older_engine_are_unset():
    event = stored([1])
    assert adopt(make_foreign(event, "session_id", "lookahead_token_ids", "ownership")) == event


def test_report_of_an_engine_is_converted_to_a_report():
    adopted = adopt(make_foreign(stored([1], event_class=kv_events.BlockReported)))
    assert type(adopted) is kv_events.BlockReported


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
