"""`ServeSettings`: what `kv-pool serve` serves, from its options and a TOML file."""

import tomllib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import open_regular

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool and the replay that keeps it busy.

    Attributes:
        trace: a file, or the name of a bundled trace.
        blocks: capacity in blocks, the null block not counted.
        block_size: tokens per block.
        run_length: what the fragmentation rate is about, in blocks.
        defrag_threshold: fragmentation rate above which the pool is compacted, 0 to 1; 1 for never.
        defrag_interval: seconds from one look at the rate to the next.
        defrag_moves: blocks moved per step of the engine, at most.
        max_evictions: cached blocks that one of these steps may overwrite, where too little is empty.
        speedup: requests come so many times faster than in the trace.
        trace_block_size: tokens per hash id of the trace; None to infer it.
        timestamp_unit: of the trace.
        duration: seconds; None for ever.
        socket: the control socket's path; None for the default one.
        name: of the node that the pool is; None for a pool that migrates nothing.
        block_bytes: of each block of a node, or of a pool with tiers; made up, and checked.
        listen: where other nodes reach it, host:port, port 0 for a free one; None for 127.0.0.1:0.
        peer: other nodes, each as `name=host:port`.
        nodes: a TOML file with other nodes ([[peers]]) and what it costs to reach them ([links]).
        registry: the node that tells who else is there, by its name or host:port; None to keep a registry for
            others.
        secret_file: what all nodes know; None for a file of this user's that is made when it is needed.
        max_rate: bytes a second that the node reads at most, such as `100MB/s`; None for no limit.
        network, rack, host, device: where the node is; the host's own name by default.
        host_tier: blocks that are kept in host memory when the pool takes theirs anew; 0 for none.
        disk_tier: a folder where blocks are kept, across restarts, too; None for none.
        disk_tier_blocks: how many; None for ten times the pool's.
        publish: the endpoint from which the pool's events are sent; None for no events.
        publish_replay: where readers of these ask for what they missed; None for nowhere.
        publish_config: a TOML file with a table [publisher], for all that can be said about a publisher;
            `publish` and `publish_replay` win over its endpoints. None for the defaults.
    """

    trace: str = "mooncake_conversation"
    blocks: _Count = 10_000
    block_size: _Count = 128
    run_length: _Count = DEFAULT_RUN_LENGTH
    defrag_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    defrag_interval: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    defrag_moves: _Count = 64
    max_evictions: Annotated[int, msgspec.Meta(ge=0)] = 16
    speedup: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    trace_block_size: _Count | None = None
    timestamp_unit: Literal["ms", "s"] = "ms"
    duration: Annotated[float, msgspec.Meta(gt=0)] | None = None
    socket: str | None = None
    name: str | None = None
    block_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4096
    listen: str | None = None
    peer: list[str] = []
    nodes: str | None = None
    registry: str | None = None
    secret_file: str | None = None
    max_rate: str | None = None
    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""
    host_tier: Annotated[int, msgspec.Meta(ge=0)] = 0
    disk_tier: str | None = None
    disk_tier_blocks: _Count | None = None
    publish: str | None = None
    publish_replay: str | None = None
    publish_config: str | None = None

    @property
    def has_tiers(self) -> bool:
        """Are there colder homes for blocks?"""
        return bool(self.host_tier) or self.disk_tier is not None

    @property
    def has_bytes(self) -> bool:
        """Do blocks need bytes: for other nodes, or for tiers?"""
        return self.name is not None or self.has_tiers


def read_settings(config: str | None, given: Mapping[str, object]) -> ServeSettings:
    """The settings of a TOML file, overridden by those that are given and not None.

    Keys of the file are the fields of `ServeSettings`, at its top level.
    Raises:
        InvalidArgumentError: no such file, no TOML, an unknown key, or a value that cannot be meant; the
            message names the file and the key.
    """
    from_file = {} if config is None else _read_file(config)
    from_command = {name: value for name, value in given.items() if value is not None}
    if from_file:
        _convert(from_file, f"{config}: ")
    return _convert({**from_file, **from_command}, "")


def check_is_node(settings: ServeSettings) -> None:
    """Raise InvalidArgumentError where something is said of a node that has no name."""
    if settings.name is None:
        defaults = ServeSettings()
        for key in ("listen", "peer", "nodes", "registry", "secret_file", "max_rate"):
            if getattr(settings, key) != getattr(defaults, key):
                raise InvalidArgumentError(f"{key} is about a node, and a node has a name; give name, too")


def _read_file(config: str) -> dict[str, object]:
    try:
        with open(open_regular(config), "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise InvalidArgumentError(f"{config}: can not read the settings: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{config}: this is no TOML: {error}") from error
    known = ServeSettings.__struct_fields__
    for name in found:
        if name not in known:
            raise InvalidArgumentError(f"{config}: unknown key {name!r}; known are {', '.join(known)}")
    return found


def _convert(values: dict[str, object], where: str) -> ServeSettings:
    try:
        return msgspec.convert(values, ServeSettings)
    except msgspec.ValidationError as error:
        # "Expected `int` >= 1 - at `$.blocks`"
        problem, _, name = str(error).partition(" - at `$.")
        raise InvalidArgumentError(f"{where}{name.rstrip('`')}: {problem}") from error
