"""`kv-pool events`: print a running event stream as lines of text or JSON, or what is cached as a table."""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kv_pool.cli.console import lay_out, print_parts
from kv_pool.cli.foreign_text import escape_json, escape_text
from kv_pool.cli.setting_options import takes
from kv_pool.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.curve_keys import CurveKeys
from kv_pool.events.mirror import PrefixMirror, apply_item
from kv_pool.events.publisher_blocks import to_medium, to_wire_hash
from kv_pool.events.stream_items import (
    BatchesLost,
    PublisherRestarted,
    PublisherSilent,
    ReceivedBatch,
    StreamItem,
    StreamSource,
)
from kv_pool.ids import GroupId
from kv_pool.lab.tables import Column, make_table
from kv_pool.option import setting

if TYPE_CHECKING:
    from kv_pool.events.subscriber import KVEventSubscriber

_REFRESH_S = 1.0

_COLUMNS = (
    Column("publisher", "name", str),
    Column("now", "now", str),
    Column("lost", "stream.num_lost"),
    Column("holds", "holds", Text),
    Column("batches", "blocks.num_batches"),
    Column("stored", "blocks.num_stored"),
    Column("removed", "blocks.num_removed"),
    Column("clears", "blocks.num_clears"),
    Column("snapshots", "stream.num_snapshots"),
    Column("restarts", "stream.num_restarts"),
)
"""The mirror's table; a row has the counts of the mirror as `blocks`, and of the subscriber as `stream`."""


@takes()
def events(
    endpoints: list[str] = setting(
        "PUB sockets, such as tcp://127.0.0.1:5557.", metavar="ENDPOINT...", is_argument=True
    ),
    replay: list[str] | None = setting(
        "Replay endpoint for missed batches, one per ENDPOINT, in order.", default=None, metavar="ENDPOINT"
    ),
    bind: bool = setting(
        "Bind to ENDPOINT, for publishers that connect to their subscribers.", default=False
    ),
    curve_server_key: list[str] | None = setting(
        "For an encrypted stream: file (.key) with the publisher's public key; one for all ENDPOINTs, or one "
        "each, in order.",
        default=None,
        metavar="FILE",
    ),
    curve_secret_key: str | None = setting(
        "File (.key_secret) with your own keys, for a publisher that admits only known subscribers.",
        default=None,
        metavar="FILE",
    ),
    topic: str = setting("Show only batches whose topic has this prefix.", default=""),
    kind: str | None = setting("Show only this kind of event: stored, removed or cleared.", default=None),
    group: int | None = setting("Show only this KV cache group.", default=None, min=0),
    medium: str | None = setting("Show only this medium: GPU, CPU, STORAGE, ...", default=None),
    json: bool = setting("Print one JSON object per line.", default=False),
    limit: int | None = setting("Stop after this many lines, or batches with --mirror.", default=None, min=1),
    mirror: bool = setting(
        "Show the blocks that each publisher has cached instead of its events.", default=False
    ),
    count_copies: bool = setting(
        "With --mirror: count the copies of a hash; drop it when it was removed as often as stored. vLLM's "
        "streams need this; for kv_pool's it makes no difference. Turn it off for streams that announce hits "
        "as stores: vLLM's full report mode.",
        default=True,
        flags=("--count-copies/--no-count-copies",),
    ),
) -> None:
    """Print the events of publishers as they arrive, or with --mirror their cached blocks, until Ctrl-C."""
    from kv_pool.events.subscriber import KVEventSubscriber

    replays: list[str | None] = [*(replay or [])]
    if len(replays) not in (0, len(endpoints)):
        raise InvalidArgumentError(
            f"{len(endpoints)} endpoints and {len(replays)} times --replay; pass one for each, or none"
        )
    replays += [None] * (len(endpoints) - len(replays))
    if mirror and (json or kind is not None):
        raise InvalidArgumentError("--mirror shows a table; leave out --json and --kind")
    chosen = LineFilter(kind, None if group is None else GroupId(group), medium)
    keys = read_keys(curve_server_key or [], curve_secret_key, len(endpoints))
    with contextlib.ExitStack() as opened:
        subscribers = {
            endpoint: opened.enter_context(
                KVEventSubscriber(endpoint, its_replay, topic, binds=bind, curve=its_keys)
            )
            for endpoint, its_replay, its_keys in zip(endpoints, replays, keys, strict=True)
        }
        show: EventPrinter | MirrorTable
        if mirror:
            show = opened.enter_context(MirrorTable(subscribers, limit, chosen, count_copies))
        else:
            show = opened.enter_context(EventPrinter(chosen, json, limit))
        asyncio.run(read_all(subscribers, show))


def read_keys(
    server_key_files: list[str], secret_key_file: str | None, num_endpoints: int
) -> list[CurveKeys | None]:
    """Return the keys for each endpoint, None for a plain stream. Raises InvalidArgumentError."""
    if not server_key_files:
        if secret_key_file is not None:
            raise InvalidArgumentError(
                "--curve-secret-key is for an encrypted stream; pass the publisher's --curve-server-key, too"
            )
        return [None] * num_endpoints
    if len(server_key_files) not in (1, num_endpoints):
        raise InvalidArgumentError(
            f"{num_endpoints} endpoints and {len(server_key_files)} times --curve-server-key; pass one for "
            f"each, or one for all"
        )
    keys = [CurveKeys.from_files(one, secret_key_file) for one in server_key_files]
    return [*keys] if len(keys) == num_endpoints else [keys[0]] * num_endpoints


async def read_all(subscribers: "dict[str, KVEventSubscriber]", show: "EventPrinter | MirrorTable") -> None:
    """Pass every item of every stream to `show` until it has enough."""

    async def read(endpoint: str, subscriber: "KVEventSubscriber") -> None:
        async for item in subscriber:
            show.take(endpoint, item)
            if show.has_enough:
                return

    async def refresh() -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            show.refresh()

    tasks = [asyncio.create_task(read(*one)) for one in subscribers.items()]
    tasks.append(asyncio.create_task(refresh()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- lines -----------------------------------------------------------------------------------------

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
        return self.passes_place(event.group_idx or 0, to_medium(event.medium))

    def passes_place(self, group: int, medium: str) -> bool:
        """Return True for blocks of a group in a medium."""
        return self.group in (None, group) and (self.medium is None or self.medium.upper() == medium)


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


# ---- on the terminal -------------------------------------------------------------------------------


class EventPrinter:
    """A printer of one line per event, and on a terminal of the rates of the last second."""

    def __init__(
        self,
        chosen: LineFilter,
        as_json: bool,
        limit: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_enough = False
        self._chosen = chosen
        self._as_json = as_json
        self._limit = limit
        self._console = Console(highlight=False, soft_wrap=True)
        self._status = None if as_json or not self._console.is_terminal else self._console.status("waiting")
        self._num_lines = 0
        self._counts: Counter[str] = Counter()
        self._clock = clock
        self._since = clock()

    def __enter__(self) -> "EventPrinter":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def take(self, endpoint: str, item: StreamItem) -> None:
        self._counts["batches"] += isinstance(item, ReceivedBatch)
        for line in make_lines(item, self._chosen):
            if self.has_enough:
                return
            if self._as_json:
                sys.stdout.write(line.to_json() + "\n")
                sys.stdout.flush()
            else:
                self._console.print(Text(line.text, style=line.style))
            self._counts[line.kind] += 1
            self._num_lines += 1
            self.has_enough = self._num_lines == self._limit

    def refresh(self) -> None:
        if self._status is None:
            return
        now = self._clock()
        rates = [
            f"{name} {count / (now - self._since):,.0f}/s" for name, count in sorted(self._counts.items())
        ]
        self._status.update(", ".join(rates) or "no events")
        self._counts.clear()
        self._since = now


class MirrorTable:
    """A table of the blocks that each publisher has cached: live on a terminal, else once at the end."""

    def __init__(
        self,
        subscribers: "dict[str, KVEventSubscriber]",
        limit: int | None,
        chosen: LineFilter,
        counts_copies: bool,
    ) -> None:
        self.has_enough = False
        self._mirror = PrefixMirror(counts_copies=counts_copies)
        self._subscribers = subscribers
        self._limit = limit
        self._chosen = chosen
        self._num_batches = 0
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._sources: dict[str, list[StreamSource]] = {endpoint: [] for endpoint in subscribers}
        for endpoint in subscribers:
            self._mirror.add_publisher(endpoint)

    def __enter__(self) -> "MirrorTable":
        if self._live is not None:
            self._live.start()
            self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is None:
            print_parts(self.lay_out(), self._console)
        else:
            self.refresh()
            self._live.stop()

    def take(self, endpoint: str, item: StreamItem) -> None:
        # A subscriber with a replay endpoint has one publisher; several may connect to one without.
        has_one = self._subscribers[endpoint].replay_endpoint is not None
        source = StreamSource() if has_one else item.source
        name = _label(endpoint, source)
        if source not in self._sources[endpoint]:
            self._sources[endpoint].append(source)
            self._mirror.add_publisher(name)
        apply_item(self._mirror, item, name)
        self._num_batches += isinstance(item, ReceivedBatch)
        self.has_enough = self._num_batches == self._limit

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(Group(*self.lay_out()), refresh=True)

    def lay_out(self) -> list[RenderableType]:
        """Return the table, in the parts that fit on the console."""
        texts = ("publisher", "now", "holds")
        table = make_table(_COLUMNS, self._list_rows(), texts=texts, title="cached blocks by publisher")
        return lay_out(table, self._console)

    def _list_rows(self) -> Iterator[SimpleNamespace]:
        for endpoint, subscriber in self._subscribers.items():
            stats = subscriber.get_statistics()
            if stats.is_silent:
                now = "silent"
            elif not stats.num_connections:
                now = "not connected"
            else:
                now = "requesting missed batches" if stats.is_recovering else "following"
            sources = self._sources[endpoint] or [StreamSource()]
            for source in sources:
                name = _label(endpoint, source)
                holds = [
                    escape_text(f"{count:,} in group {group} {medium}")
                    for (group, medium), count in sorted(self._mirror.count_by_place(name).items())
                    if self._chosen.passes_place(group, medium)
                ]
                yield SimpleNamespace(
                    name=endpoint if len(sources) == 1 else name,
                    now=now,
                    holds="\n".join(holds) or "nothing",
                    blocks=self._mirror.get_counts(name),
                    stream=stats.counts,
                )


def _label(endpoint: str, source: StreamSource) -> str:
    """Return the name of a publisher: its endpoint, with what is known of its topic and rank."""
    rank = "" if source.rank is None else f"rank {source.rank}"
    return " ".join(filter(None, (endpoint, source.topic, rank)))
