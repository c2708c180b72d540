"""`ServeSettings`: what `kv-pool serve` serves, from its options and a TOML file; each declared once."""

import tomllib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import open_regular
from kv_pool.replay.event_feed import PUBLISH, PUBLISH_CONFIG, PUBLISH_REPLAY
from kv_pool.replay.option import Option, describe_options, list_options
from kv_pool.replay.settings import TRACE_BLOCK_SIZE
from kv_pool.replay.trace import BUNDLED_TRACES

_Count = Annotated[int, msgspec.Meta(ge=1)]

_DEFRAG = "Compaction"
_NODES = "Nodes"
_TIERS = "Tiers"


@describe_options
class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool and the replay that keeps it busy.

    Attributes:
        network, rack, host, device: where the node is. By default the host's own name, and as device what
            `migration.machine.name_device` finds; network and rack no machine tells of itself.
    """

    trace: Annotated[
        str,
        Option(f"A trace file, or one of: {', '.join(BUNDLED_TRACES)}.", metavar="TRACE", is_argument=True),
    ] = "mooncake_conversation"
    blocks: Annotated[_Count, Option("Capacity in blocks.", aliases=("kv_pool_size",))] = 10_000
    block_size: Annotated[_Count, Option("Tokens per block.", aliases=("kv_block_size",))] = 128
    manager: Annotated[
        bool, Option("Serve a KVCacheManager, as engines with a scheduler have it, not a GPUKVPool.")
    ] = False
    run_length: Annotated[_Count, Option("Fragmentation is about runs of so many blocks.")] = (
        DEFAULT_RUN_LENGTH
    )
    enable_defragmentation: Annotated[
        bool,
        Option(
            "Compact the pool while it runs. So it is, unless --config says otherwise.",
            panel=_DEFRAG,
            flags=("--enable-defragmentation",),
        ),
    ] = True
    defrag_threshold: Annotated[
        float,
        msgspec.Meta(ge=0, le=1),
        Option("Compact above this fragmentation rate; 1 for never.", panel=_DEFRAG),
    ] = 0.1
    defrag_interval: Annotated[
        float, msgspec.Meta(ge=0), Option("Seconds between two looks at the rate.", panel=_DEFRAG)
    ] = 1.0
    defrag_moves: Annotated[_Count, Option("Blocks moved per step of the engine.", panel=_DEFRAG)] = 64
    max_evictions: Annotated[
        int,
        msgspec.Meta(ge=0),
        Option("Cached blocks that such a step may lose instead of moving them.", panel=_DEFRAG),
    ] = 0
    speedup: Annotated[float, msgspec.Meta(gt=0), Option("Requests come so much faster.")] = 1.0
    trace_block_size: Annotated[_Count | None, TRACE_BLOCK_SIZE] = None
    timestamp_unit: Annotated[Literal["ms", "s"], Option("Of the trace: ms or s.")] = "ms"
    duration: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None, Option("Seconds. Default: until Ctrl-C.")
    ] = None
    socket: Annotated[str | None, Option("The control socket. Default: this user's own.")] = None
    name: Annotated[
        str | None,
        Option("Make the pool a node of this name: sequences can move from it and to it.", panel=_NODES),
    ] = None
    block_bytes: Annotated[
        _Count,
        Option(
            "Of each block of a node, or of a pool with tiers; the bytes are made up.",
            panel=_NODES,
        ),
    ] = 4096
    listen: Annotated[
        str | None,
        Option(
            "Where other nodes reach it; port 0 for a free one. Default: 127.0.0.1:0.",
            metavar="HOST:PORT",
            panel=_NODES,
        ),
    ] = None
    peer: Annotated[
        list[str], Option("Another node; may be repeated.", metavar="NAME=HOST:PORT", panel=_NODES)
    ] = []
    nodes: Annotated[
        str | None,
        Option(
            "A TOML file with other nodes ([[peers]]) and what it costs to reach them ([links.rack]).",
            metavar="FILE",
            panel=_NODES,
        ),
    ] = None
    registry: Annotated[
        str | None,
        Option(
            "The node that tells who else is there. Default: this one, for others.",
            metavar="NAME|HOST:PORT",
            panel=_NODES,
        ),
    ] = None
    secret_file: Annotated[
        str | None,
        Option(
            "What all nodes know, 16 bytes or more. Default: a file of this user's, made when it is "
            "needed, which does for nodes of one machine.",
            metavar="FILE",
            panel=_NODES,
        ),
    ] = None
    backend: Annotated[
        list[str],
        Option(
            "How other nodes read its blocks: tcp, or nixl for RDMA; may be repeated, the preferred one "
            "first. Default: tcp.",
            panel=_NODES,
        ),
    ] = []
    max_rate: Annotated[
        str | None,
        Option(
            "What the node reads in a second at most, such as 100MB/s. Default: no limit.",
            metavar="RATE",
            panel=_NODES,
        ),
    ] = None
    offload_threshold: Annotated[
        int,
        msgspec.Meta(ge=0),
        Option(
            "Move sequences to nodes with room while fewer blocks than this are free; 0 for never.",
            metavar="BLOCKS",
            panel=_NODES,
        ),
    ] = 0
    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""
    host_tier: Annotated[
        int,
        msgspec.Meta(ge=0),
        Option(
            "Keep so many blocks in host memory when the pool takes theirs anew.",
            metavar="BLOCKS",
            panel=_TIERS,
        ),
    ] = 0
    disk_tier: Annotated[
        str | None,
        Option(
            "Keep blocks here when memory has no room for them; they outlive a restart.",
            metavar="FOLDER",
            panel=_TIERS,
        ),
    ] = None
    disk_tier_blocks: Annotated[
        _Count | None,
        Option("How many. Default: ten times the pool's.", metavar="BLOCKS", panel=_TIERS),
    ] = None
    publish: Annotated[str | None, PUBLISH] = None
    publish_replay: Annotated[str | None, PUBLISH_REPLAY] = None
    publish_config: Annotated[str | None, PUBLISH_CONFIG] = None

    @property
    def compaction_threshold(self) -> float:
        """The fragmentation rate above which blocks are moved; 1.0 for never."""
        return self.defrag_threshold if self.enable_defragmentation else 1.0

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

    Keys of the file are the fields of `ServeSettings`, at its top level, or other names of their options:
    `kv_pool_size` is `blocks`.
    Raises:
        InvalidArgumentError: no such file, no TOML, an unknown key, or a value that cannot be meant; the
            message names the file and the key.
    """
    from_file = {} if config is None else _read_file(config)
    from_command = _resolve({name: value for name, value in given.items() if value is not None}, "")
    if from_file:
        _convert(from_file, f"{config}: ")
    return _convert({**from_file, **from_command}, "")


def check_is_node(settings: ServeSettings) -> None:
    """Raise InvalidArgumentError where something is said of a node that has no name."""
    if settings.name is None:
        defaults = ServeSettings()
        about_node = ("listen", "peer", "nodes", "registry", "secret_file", "backend", "max_rate")
        for key in (*about_node, "offload_threshold"):
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
    return _resolve(found, f"{config}: ")


def _resolve(found: dict[str, object], where: str) -> dict[str, object]:
    """Values by the names of fields. Raises InvalidArgumentError: an unknown name, or two of one field."""
    known = ServeSettings.__struct_fields__
    values: dict[str, object] = {}
    for key, value in found.items():
        name = _OTHER_NAMES.get(key, key)
        if name not in known:
            raise InvalidArgumentError(f"{where}unknown key {key!r}; known are {', '.join(known)}")
        if name in values:
            raise InvalidArgumentError(f"{where}{key} is another name of {name}; give one of them")
        values[name] = value
    return values


_OTHER_NAMES = {alias: name for name, _, option in list_options(ServeSettings) for alias in option.aliases}


def _convert(values: dict[str, object], where: str) -> ServeSettings:
    try:
        return msgspec.convert(values, ServeSettings)
    except msgspec.ValidationError as error:
        # "Expected `int` >= 1 - at `$.blocks`"
        problem, _, name = str(error).partition(" - at `$.")
        raise InvalidArgumentError(f"{where}{name.rstrip('`')}: {problem}") from error
