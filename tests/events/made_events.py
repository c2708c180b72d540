"""Short notation for events: hashes are numbers, block size is 2, block n has tokens 10n and 10n + 1."""

from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.events.stream_state import StreamState


def stored(hashes, parent=None, event_class=BlockStored, *, token_ids=None, **fields):
    if token_ids is None:
        token_ids = [token for number in hashes for token in (10 * number, 10 * number + 1)]
    fields = {
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        **fields,
    }
    return event_class(block_hashes=list(hashes), parent_block_hash=parent, token_ids=token_ids, **fields)


def removed(*hashes, medium="GPU", group_idx=0, **fields):
    return BlockRemoved(list(hashes), medium, group_idx, **fields)


def draw(events, name=str):
    """Parse `1 > 2 3` (a store of 2 and 3 after 1), `- 2 3` (a removal) or `clear`."""
    drawn = []
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            before = [] if parent is None else [name(parent)]
            drawn.append(" ".join(map(str, [*before, ">", *map(name, event.block_hashes)])))
        elif isinstance(event, BlockRemoved):
            drawn.append(" ".join(map(str, ["-", *map(name, event.block_hashes)])))
        else:
            drawn.append("clear")
    return drawn


def made(*events, **options):
    """Return a state to which these events were applied, one batch for each."""
    state = StreamState(**options)
    for event in events:
        state.apply([event])
    return state


def send(state, *events):
    """Return what a state sends for one batch, drawn."""
    return draw(state.apply(list(events)))


def snap(state):
    """Return a snapshot, drawn."""
    return draw(state.take_snapshot()[1])
