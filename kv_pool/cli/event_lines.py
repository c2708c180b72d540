"""Items of an event stream as lines of text or JSON."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kv_pool.cli.foreign_text import escape_json, escape_text
from kv_pool.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.publisher_blocks import to_medium, to_wire_hash
from kv_pool.events.stream_items import (
    BatchesLost,
    PublisherRestarted,
    PublisherSilent,
    ReceivedBatch,
    StreamItem,
)
from kv_pool.ids import GroupId

KINDS = ("stored", "removed", "cleared")
STYLES = {
    "stored": "green",
    "removed": "red",
    "cleared": "bold yellow",
    "lost": "bold white on red",
    "healed": "yellow",
    "restarted": "bold magenta",
    "silent": "dim",
}
_SHOWN_TOKENS = 6
_STORED_FIELDS = ("token_ids", "block_size", "lora_id", "lora_name", "kv_cache_spec_kind")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its kind, its text, and its fields for JSON. Foreign strings are escaped."""

    kind: str
    text: str
    fields: dict[str, Any]

    @property
    def style(self) -> str:
        """The style on a terminal. A loss that a snapshot heals, as at a first connection, is no alarm."""
        return STYLES["healed" if self.fields.get("is_healed") else self.kind]

    def to_json(self) -> str:
        return escape_json(msgspec.json.encode(self.fields, enc_hook=str).decode())


@dataclass(frozen=True, slots=True)
class LineFilter:
    """A filter of events; None passes all. A clear has neither group nor medium; those two filters pass it.

    Raises:
        InvalidArgumentError: an unknown kind.
    """

    kind: str | None = None
    group: GroupId | None = None
    medium: str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise InvalidArgumentError(f"--kind is {self.kind!r}; it is one of {', '.join(KINDS)}")

    def passes(self, event: KVCacheEvent) -> bool:
        if self.kind not in (None, kind_of(event)):
            return False
        if not isinstance(event, BlockStored | BlockRemoved):
            return True
        if self.group not in (None, event.group_idx or 0):
            return False
        return self.medium is None or self.medium.upper() == to_medium(event.medium)


def kind_of(event: KVCacheEvent) -> str:
    """Return the kind of an event, one of `KINDS`."""
    if isinstance(event, BlockStored):
        return "stored"
    return "removed" if isinstance(event, BlockRemoved) else "cleared"


def make_lines(item: StreamItem, chosen: LineFilter) -> list[Line]:
    """Return a line for each event of a batch that passes the filter, or for a loss, restart or silence."""
    match item:
        case ReceivedBatch():
            return [make_event_line(item, event) for event in item.batch.events if chosen.passes(event)]
        case BatchesLost(first, last, is_healed):
            how = "a snapshot follows" if is_healed else "for good"
            text = f"{first:>8} lost     to {last}, {last - first + 1} batches, {how}"
            return [
                Line("lost", text, {"kind": "lost", "first": first, "last": last, "is_healed": is_healed})
            ]
        case PublisherRestarted():
            return [Line("restarted", f"{'':8} restarted", {"kind": "restarted"})]
        case PublisherSilent(seconds):
            text = f"{'':8} silent   for {seconds:.1f} s"
            return [Line("silent", text, {"kind": "silent", "seconds": seconds})]


def make_event_line(item: ReceivedBatch, event: KVCacheEvent) -> Line:
    """Return a line: sequence, kind, number of blocks, first hash, parent, first tokens, group, medium."""
    kind = kind_of(event)
    fields: dict[str, Any] = {
        "sequence": item.sequence,
        "ts": item.batch.ts,
        "rank": item.batch.data_parallel_rank,
        "is_replayed": item.is_replayed,
        "kind": kind,
    }
    if item.source.topic:
        fields["topic"] = item.source.topic
    text = f"{item.sequence:>8} {kind:<8}"
    if isinstance(event, BlockStored | BlockRemoved):
        hashes = [to_wire_hash(one) for one in event.block_hashes]
        fields["block_hashes"] = hashes
        text += f" {len(hashes):>4} {'block ' if len(hashes) == 1 else 'blocks'}"
        text += f" {show_hash(hashes[0] if hashes else None)}"
        if isinstance(event, BlockStored):
            parent = None if event.parent_block_hash is None else to_wire_hash(event.parent_block_hash)
            fields["parent_block_hash"] = parent
            fields |= {name: getattr(event, name) for name in _STORED_FIELDS}
            text += f"  after {show_hash(parent)}  tokens {show_tokens(event.token_ids)}"
            adapter = event.lora_name if event.lora_name is not None else event.lora_id
            if adapter is not None:
                text += f"  adapter {escape_text(str(adapter))}"
        fields["group_idx"] = event.group_idx
        fields["medium"] = event.medium
        text += f"  group {event.group_idx or 0} {escape_text(to_medium(event.medium))}"
    return Line(kind, text, fields)


def show_hash(block_hash: int | None) -> str:
    """Return a hash as 16 hexadecimal digits, or a dash for None."""
    return f"{'-':<16}" if block_hash is None else f"{block_hash:016x}"


def show_tokens(token_ids: list[int]) -> str:
    """Return the first few tokens and the number of all."""
    if not token_ids:
        return "-"
    dots = " …" if len(token_ids) > _SHOWN_TOKENS else ""
    return f"{' '.join(map(str, token_ids[:_SHOWN_TOKENS]))}{dots} ({len(token_ids)})"
