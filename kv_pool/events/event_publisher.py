"""`EventPublisher`: the settings, counters and methods of all publishers; and one that sends nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Protocol, Self

import msgspec

from kv_pool.closing import Closing
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import InvalidArgumentError, PublisherClosedError
from kv_pool.events.endpoints import check_endpoint, offset_endpoint
from kv_pool.loggers import get_logger
from kv_pool.regular_files import read_toml

_logger = get_logger(__name__)

# ---- settings ----------------------------------------------------------------------------------------

SPEC_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "sink_full_attention",
    "encoder_only_attention",
    "cross_attention",
    "unknown",
)
"""The kinds of KV cache groups in events. Readers index full, mla and sink_full, and drop the others."""


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer, {least} or more")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of one KV cache group, as its stores carry them.

    Attributes:
        kind: one of `SPEC_KINDS`.
        sliding_window: tokens, for kinds that have one.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, SPEC_KINDS)
        if self.sliding_window is not None:
            _check_count("sliding_window", self.sliding_window, 1)


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a publisher. Names shared with vLLM's `KVEventsConfig` have the same meaning.

        >>> from kv_pool.events import PublisherConfig
        >>> PublisherConfig(endpoint="tcp://*:5557", data_parallel_rank=2).rank_endpoint
        'tcp://*:5559'

    Attributes:
        endpoint: live endpoint of rank 0. The default is reachable only from this machine; vLLM's default,
            `tcp://*:5557`, is reachable from every network of the machine.
        replay_endpoint: replay endpoint of rank 0, where readers request batches they missed; None disables
            replay.
        bind: whether to bind `endpoint` or connect to it; None lets `endpoints.should_bind` decide.
        buffer_steps: number of batches kept for replay.
        hwm: number of batches that ZeroMQ queues per slow subscriber. ZeroMQ drops later batches silently;
            the subscriber notices the gap, and requests them if it can. vLLM's default is 100,000.
        max_readers: maximum number of readers whose replay requests are answered or wait.
        max_unread_bytes: maximum number of bytes of large replies that ZeroMQ holds for all readers of
            replays together; further replies wait.
        slow_reader_s: seconds after which a TCP connection whose reader reads nothing is closed, where the
            system supports it (Linux), and after which its replay ends and is counted; a replay gets one
            second longer for each MB sent.
        max_queue_size: maximum number of batches queued between the pool's thread and the publisher's.
        topic: prefix that subscribers filter by. llm-d needs `kv@<pod id>@<model>`.
        data_parallel_rank: sent in every batch and added to the ports.
        first_sequence: "zero", "clock" or a number. llm-d with replay requires a stream that starts at 0, and
            treats a lower sequence as a restart. Dynamo's indexer does not: it drops batches until the old
            number is passed, and keeps the blocks of the previous incarnation. SMG misses the restart if it
            first sees the new numbers after they have passed the old one. For both use "clock", microseconds
            since the epoch: a restart then leaves a gap, the readers request it, and a publisher with a
            `state` answers with a clear and all resident blocks. Dynamo applies the answer; SMG starts over.
            Use a number if the engine continues where it stopped, as a loaded pool does: the first batch is
            then the next one of the same stream and has to announce all changes since the last one.
        when_full: "drop_oldest" or "drop_newest": the batch to drop when the queue is full. A dropped batch
            is counted and leaves a hole in the sequence. The pool's thread never waits.
        heartbeat_s: an idle publisher sends an empty batch after this many seconds, so that readers notice
            missed batches. Each heartbeat counts towards `buffer_steps`. None disables heartbeats.
        positional: encode events as arrays, for readers older than June 2026.
        groups: kind and window of each KV cache group, by group id. They are added to stores without a kind,
            as "unknown" for groups that are not listed: readers drop stores without a kind.
        curve_secret_key_file: the server's certificate with its secret key, as `zmq.auth.create_certificates`
            writes it. Encrypts the stream, and rejects readers without the server's public key. Use it for
            streams that leave the machine.
        curve_client_keys_dir: directory of the public keys of admitted readers; None admits every reader that
            has the server's public key.
        linger_s: seconds that `close()` waits for batches to be sent.

    Raises:
        InvalidArgumentError: an invalid value; the message names it and the valid ones.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    bind: bool | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_readers: int = 256
    max_unread_bytes: int = 128 * 2**20
    slow_reader_s: float = 10.0
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0
    first_sequence: Literal["zero", "clock"] | int = "zero"
    when_full: Literal["drop_oldest", "drop_newest"] = "drop_oldest"
    heartbeat_s: float | None = None
    positional: bool = False
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    curve_secret_key_file: str | None = None
    curve_client_keys_dir: str | None = None
    linger_s: float = 1.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_count(name, getattr(self, name), least)
        if isinstance(self.first_sequence, str):
            _check_choice("first_sequence", self.first_sequence, ("zero", "clock"))
        else:
            _check_count("first_sequence", self.first_sequence, 0)
        _check_choice("when_full", self.when_full, ("drop_oldest", "drop_newest"))
        if self.heartbeat_s is not None and not self.heartbeat_s > 0:
            raise InvalidArgumentError(f"heartbeat_s is {self.heartbeat_s}; use a value above 0, or None")
        if not 0 < self.slow_reader_s < float("inf"):
            raise InvalidArgumentError(f"slow_reader_s is {self.slow_reader_s}; use a finite value above 0")
        if not 0 <= self.linger_s < float("inf"):
            raise InvalidArgumentError(f"linger_s is {self.linger_s}; use a finite value, 0 or more")
        check_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint(self.replay_endpoint)
        # Check both endpoints now rather than when the publisher starts.
        live, replay = self.rank_endpoint, self.rank_replay_endpoint
        if replay == live and not live.endswith((":0", ":*")):
            raise InvalidArgumentError(f"endpoint and replay_endpoint are both {live!r}; they must differ")
        if self.curve_secret_key_file is None:
            if self.curve_client_keys_dir is not None:
                raise InvalidArgumentError(
                    "curve_client_keys_dir is set and curve_secret_key_file is not; reader keys are checked "
                    "only on an encrypted stream"
                )
            return
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None and endpoint.startswith("inproc://"):
                raise InvalidArgumentError(
                    f"endpoint {endpoint!r} stays in this process; CURVE is for tcp and ipc"
                )

    @classmethod
    def for_routers(cls, **settings: Any) -> Self:
        """Return the settings that routers and indexers need: replay, clock numbers, a heartbeat per second.

        Also pass a `StreamState()` to the publisher: without one there are no snapshots, and each copy of a
        block is announced. `settings` are those of the class and override these defaults.

            >>> from kv_pool.events import PublisherConfig
            >>> config = PublisherConfig.for_routers(endpoint="tcp://*:6000", replay_endpoint="tcp://*:6100")
            >>> config.first_sequence, config.heartbeat_s
            ('clock', 1.0)

        The ports of the default endpoints leave room for 100 data-parallel ranks each.
        """
        needed = {"replay_endpoint": "tcp://127.0.0.1:5657", "first_sequence": "clock", "heartbeat_s": 1.0}
        return cls(**{**needed, **settings})

    @property
    def rank_endpoint(self) -> str:
        """The endpoint of this rank, as configured: port 0 is still 0."""
        return offset_endpoint(self.endpoint, self.data_parallel_rank)

    @property
    def rank_replay_endpoint(self) -> str | None:
        """The replay endpoint of this rank, as configured."""
        if self.replay_endpoint is None:
            return None
        return offset_endpoint(self.replay_endpoint, self.data_parallel_rank)

    def find_first_sequence(self, clock: Callable[[], float]) -> int:
        """Return the sequence of the first batch; `clock` returns seconds since the epoch."""
        if isinstance(self.first_sequence, int):
            return self.first_sequence
        return int(clock() * 1_000_000) if self.first_sequence == "clock" else 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Create a configuration from plain values; `groups` is a list of mappings.

        Raises:
            InvalidArgumentError: an unknown key, a value of the wrong type, or an invalid value.
        """
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            known = ""
            if "unknown field" in str(error):
                known = f"; known are {', '.join(cls.__struct_fields__)}, and in groups kind, sliding_window"
            raise InvalidArgumentError(f"the publisher's configuration: {error}{known}") from error

    @classmethod
    def from_toml(cls, path: str | PathLike[str], table: str = "publisher") -> Self:
        """Create a configuration from a table of a TOML file; dots in `table` name nested tables.

        Raises:
            InvalidArgumentError: the file cannot be read, is not TOML, or has no such table; or as
                `from_mapping`. It names the file.
        """
        found: Any = read_toml(path, "the publisher's configuration")
        for name in table.split("."):
            if not isinstance(found, dict) or name not in found:
                raise InvalidArgumentError(f"{path}: there is no table [{table}]")
            found = found[name]
        if not isinstance(found, dict):
            raise InvalidArgumentError(f"{path}: {table} is a value, not a table")
        try:
            return cls.from_mapping(found)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: [{table}]: {error}") from error


_LEAST = {
    "buffer_steps": 1,
    "hwm": 1,  # ZeroMQ treats 0 as no bound
    "max_readers": 1,
    "max_unread_bytes": 1,
    "max_queue_size": 1,
    "data_parallel_rank": 0,
}
"""The integer settings and their minimum values."""


# ---- counters ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class PublisherStatistics:
    """The counters of a publisher; all but the last two only grow.

    Attributes:
        num_batches_sent, num_events_sent, num_bytes_sent: sent live; bytes of payloads.
        num_empty_batches_sent: of these, heartbeats and steps for which the state had nothing to send.
        num_batches_dropped, num_events_dropped: dropped by a full queue, or not sent within `linger_s` of
            `close()`.
        num_batches_failed, num_events_failed: could not be encoded or sent, or were rejected by the state.
        num_replays: replay requests that were answered to the end marker.
        num_snapshots: snapshots sent.
        num_replays_abandoned: requests not answered, or not completely: the reader was gone or did not read.
        num_readers_dropped: of these, readers that read nothing for `slow_reader_s`, while their connections
            were open.
        num_malformed_requests: malformed requests on the replay socket, which were ignored.
        num_queued: batches currently queued for the publisher's thread.
        last_sequence: sequence of the latest batch, sent or failed; None before the first one.
    """

    num_batches_sent: int = 0
    num_events_sent: int = 0
    num_bytes_sent: int = 0
    num_empty_batches_sent: int = 0
    num_batches_dropped: int = 0
    num_events_dropped: int = 0
    num_batches_failed: int = 0
    num_events_failed: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    num_replays_abandoned: int = 0
    num_malformed_requests: int = 0
    num_readers_dropped: int = 0
    num_queued: int = 0
    last_sequence: int | None = None

    def count_sent(self, events: Any, num_bytes: int) -> None:
        """Count a batch that was sent live, with a payload of `num_bytes`."""
        self.num_batches_sent += 1
        self.num_events_sent += len(events)
        self.num_bytes_sent += num_bytes
        self.num_empty_batches_sent += not events

    def count_dropped(self, events: Any, num_queued: int) -> None:
        """Count a batch that is dropped, and log some of these occurrences."""
        self.num_batches_dropped += 1
        self.num_events_dropped += _count(events)
        if is_worth_logging(self.num_batches_dropped):
            _logger.warning(
                "%d batches of events dropped so far, %d are queued; raise max_queue_size to queue more",
                self.num_batches_dropped,
                num_queued,
                extra={"dropped_batches": self.num_batches_dropped, "queued_batches": num_queued},
            )

    def count_failed(self, events: Any) -> None:
        """Count a batch that failed with the exception being handled, and log some of these occurrences."""
        self.num_batches_failed += 1
        self.num_events_failed += _count(events)
        if is_worth_logging(self.num_batches_failed):
            fields = {"failed_batches": self.num_batches_failed}
            _logger.exception("%d batches of events failed so far", self.num_batches_failed, extra=fields)


def is_worth_logging(count: int) -> bool:
    """Return True for the 1st, 2nd, 4th, 8th occurrence, and so on."""
    return count & (count - 1) == 0


def _count(events: Any) -> int:
    """Return the number of events; an invalid argument without a length counts as one."""
    try:
        return len(events)
    except TypeError:
        return 1


# ---- publishers --------------------------------------------------------------------------------------


class EventPublisher(Protocol):
    """A publisher of a pool's events.

    Attributes:
        endpoint, replay_endpoint: with the actual port; None if there is none.
    """

    endpoint: str | None
    replay_endpoint: str | None

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish the events of one scheduler step as one batch. The publisher takes ownership of the list.

        An empty list is not sent. Never waits for a socket, an encoder or a reader. May be called from any
        thread; the batches of one thread are sent in order.

        Raises:
            PublisherClosedError: after `close()`.
        Cost: O(1), independent of the number of events.
        """

    def get_statistics(self) -> PublisherStatistics:
        """Return the counters; a batch that is being sent may be in only some of them."""

    def close(self) -> None:
        """Send the batches published so far, and stop. Idempotent."""


class NullEventPublisher(Closing):
    """A publisher that discards events, for engines whose stream is turned off."""

    def __init__(self) -> None:
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None
        self._is_closed = False

    def publish(self, events: list[KVCacheEvent]) -> None:
        if self._is_closed:
            raise PublisherClosedError("the publisher is closed")

    def get_statistics(self) -> PublisherStatistics:
        return PublisherStatistics()

    def close(self) -> None:
        self._is_closed = True
