"""`PublisherConfig`: everything that can be said about a publisher, from Python, a mapping or a TOML file."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal, Self

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.endpoints import check_endpoint, offset_endpoint
from kv_pool.regular_files import open_regular

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
"""What readers are told about a KV cache group. They index full, mla and sink_full, and drop the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """What the stores of one KV cache group say about it.

    Attributes:
        kind: one of `SPEC_KINDS`.
        sliding_window: tokens, for kinds that have one.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in SPEC_KINDS:
            raise InvalidArgumentError(f"kind is {self.kind!r}; it is one of {', '.join(SPEC_KINDS)}")
        if self.sliding_window is not None:
            _check_count("sliding_window", self.sliding_window, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherConfig:
    """How a publisher sends. Names that vLLM's `KVEventsConfig` has mean the same here.

        >>> from kv_pool.events import PublisherConfig
        >>> PublisherConfig(endpoint="tcp://*:5557", data_parallel_rank=2).rank_endpoint
        'tcp://*:5559'

    Attributes:
        endpoint: of rank 0, for live batches. Only this machine reaches the default; vLLM's is
            `tcp://*:5557`, open to every network that the machine is on.
        replay_endpoint: of rank 0, where readers ask for batches that they missed; None for no replay.
        bind: whether to bind `endpoint` or connect to it; None for `endpoints.should_bind`.
        buffer_steps: batches kept for replay.
        hwm: batches that ZeroMQ keeps per subscriber that is behind; it drops what comes after, unnoticed
            until the subscriber sees the gap.
        max_readers: connections to both sockets together; those beyond are closed at once, and counted.
        max_unread_bytes: what ZeroMQ may hold of live batches for all subscribers together, to 1 MiB. When it
            is more, the connection with most bytes unsent is closed, and counted. The same again for replies
            on the replay socket: what goes beyond waits until readers have read.
        slow_reader_s: the connection of a reader that leaves its replay unread for this long is closed, and
            counted; a second longer for each MB it was sent.
        max_queue_size: batches between the pool's thread and the publisher's.
        topic: what subscribers filter by. llm-d needs `kv@<pod id>@<model>`.
        data_parallel_rank: goes into every batch, and is added to the ports.
        first_sequence: "zero", "clock", or a number. llm-d with replay insists on a stream that starts at 0,
            and takes a lower sequence for a restart. Dynamo's indexer does not: it drops batches until the
            old number is passed, and keeps the blocks of the earlier life; nor does SMG when it sees the new
            numbers only after they have passed the old one. For these take "clock", microseconds since the
            epoch: a restart goes up and leaves a gap, which they ask to have filled, and a publisher that has
            a `state` answers with a clear and what is there now. Dynamo takes that; SMG begins anew. A number
            is for an engine that goes on where it stopped, as a loaded pool does: the first batch is the next
            one of the same stream, and has to say what is different now.
        when_full: "drop_oldest" or "drop_newest": which batch goes when the queue is full. Either is
            counted and leaves a hole in the sequence. The pool's thread never waits.
        heartbeat_s: an idle publisher sends an empty batch after so many seconds, by which readers notice
            that they missed the last ones. Each takes a place among the `buffer_steps`. None for none.
        positional: events as arrays, for readers older than June 2026.
        groups: kind and window of each KV cache group, by group id. Stores that do not say them get them
            from here, "unknown" for a group that is not listed: without a kind readers drop them.
        curve_secret_key_file: the server's certificate with its secret key, as `zmq.auth.create_certificates`
            writes it: encrypts, and refuses whoever does not know the server's public key.
            For streams that leave the machine.
        curve_client_keys_dir: the public keys of those who may read; None for all who know the server's.
        linger_s: how long `close()` waits for batches to leave.

    Raises:
        InvalidArgumentError: a value that can not be meant; the message says which and what can.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    bind: bool | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
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
            raise InvalidArgumentError(f"heartbeat_s is {self.heartbeat_s}; it is above 0, or None for none")
        if not 0 < self.slow_reader_s < float("inf"):
            raise InvalidArgumentError(f"slow_reader_s is {self.slow_reader_s}; it is above 0, and finite")
        if not 0 <= self.linger_s < float("inf"):
            raise InvalidArgumentError(f"linger_s is {self.linger_s}; it is 0 or more, and finite")
        check_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint(self.replay_endpoint)
        # Both have to be possible, and are told now rather than when the publisher starts.
        live, replay = self.rank_endpoint, self.rank_replay_endpoint
        if replay == live and not live.endswith((":0", ":*")):
            raise InvalidArgumentError(
                f"endpoint and replay_endpoint are both {live!r}; they are two sockets"
            )
        self._check_curve()

    @classmethod
    def for_routers(cls, **settings: Any) -> Self:
        """What routers and indexers need: replay, numbers from the clock, a heartbeat each second.

        Give the publisher a `StreamState()`, too: without one there are no snapshots, and copies are
        announced one by one. `settings` are those of the class, and win.

            >>> from kv_pool.events import PublisherConfig
            >>> config = PublisherConfig.for_routers(endpoint="tcp://*:6000", replay_endpoint="tcp://*:6100")
            >>> config.first_sequence, config.heartbeat_s
            ('clock', 1.0)

        The ports of the default endpoints leave room for 100 data-parallel ranks each.
        """
        return cls(**{**_FOR_ROUTERS, **settings})

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

    def choose_first_sequence(self, clock: Callable[[], float]) -> int:
        """The number of the first batch; `clock` gives seconds since the epoch."""
        if isinstance(self.first_sequence, int):
            return self.first_sequence
        return int(clock() * 1_000_000) if self.first_sequence == "clock" else 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From plain values; `groups` is a list of mappings.

        Raises:
            InvalidArgumentError: an unknown key, a value of the wrong type, or one that can not be meant.
        """
        known = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in known]
        unknown += [
            f"groups.{key}"
            for group in _list_mappings(values.get("groups"))
            for key in group
            if key not in ("kind", "sliding_window")
        ]
        if unknown:
            raise InvalidArgumentError(
                f"unknown {', '.join(map(repr, unknown))} for a publisher; known are {', '.join(known)}, "
                f"and in groups kind and sliding_window"
            )
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise InvalidArgumentError(f"the publisher's configuration: {error}") from error

    @classmethod
    def from_toml(cls, path: str | PathLike[str], table: str = "publisher") -> Self:
        """From a table of a TOML file; dots in `table` lead into tables of tables.

        Raises:
            InvalidArgumentError: no such table, no TOML, or as `from_mapping`; the message names the file.
            OSError: the file can not be read.
        """
        with open(open_regular(path), "rb") as file:
            try:
                found: Any = tomllib.load(file)
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidArgumentError(f"{path}: not TOML: {error}") from error
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

    def _check_curve(self) -> None:
        if self.curve_secret_key_file is None:
            if self.curve_client_keys_dir is not None:
                raise InvalidArgumentError(
                    "curve_client_keys_dir is set and curve_secret_key_file is not; readers are told apart "
                    "by their keys only on an encrypted stream"
                )
            return
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None and endpoint.startswith("inproc://"):
                raise InvalidArgumentError(
                    f"endpoint {endpoint!r} stays in this process; CURVE is for tcp and ipc"
                )


_FOR_ROUTERS: dict[str, Any] = {
    "replay_endpoint": "tcp://127.0.0.1:5657",
    "first_sequence": "clock",
    "heartbeat_s": 1.0,
}

_LEAST = {
    "buffer_steps": 1,
    "hwm": 1,  # ZeroMQ's 0 would be no bound at all
    "max_readers": 1,
    "max_unread_bytes": 1,
    "max_queue_size": 1,
    "data_parallel_rank": 0,
}
"""The integers, and the lowest each can be."""


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}; it is an integer, {least} or more")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} is {value!r}; it is {' or '.join(map(repr, choices))}")


def _list_mappings(groups: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; whatever else was given is msgspec's to refuse."""
    return (
        [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list | tuple) else []
    )
