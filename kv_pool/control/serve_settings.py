"""`ServeSettings`: the settings of `kv-pool serve`, also from a TOML file; `open_pool`: a pool from it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import msgspec

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous.defragmenter import Defragmentable, Defragmenter
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.network_port import NetworkPort
from kv_pool.errors import InvalidArgumentError, describe_known
from kv_pool.option import Option, describe_options, list_options
from kv_pool.quantities import parse_memory
from kv_pool.regular_files import read_toml
from kv_pool.shared_options import (
    BUNDLED_TRACES,
    PUBLISH,
    PUBLISH_CONFIG,
    PUBLISH_REPLAY,
    TIME_UNIT,
    TRACE_BLOCK_SIZE,
)

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Size = Annotated[int, msgspec.Meta(ge=0)]

_NODES = "Nodes"
_compacting = partial(Option, panel="Compaction")
_of_nodes = partial(Option, panel=_NODES)
_of_tiers = partial(Option, panel="Tiers")
_of_network = partial(Option, panel="Network")

_WEB_PORT = "9400"


@describe_options
class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a served pool, its replay, its node and its tiers.

    Attributes:
        network, rack, host, device: the location of the node. Defaults: the name of the host, and the device
            that `migration.machine.name_device` finds; network and rack are unknown unless they are set.
    """

    trace: Annotated[
        str,
        Option(
            f"A trace file, or one of: {', '.join(BUNDLED_TRACES)}.",
            metavar="TRACE",
            known=lambda: BUNDLED_TRACES,
            is_argument=True,
        ),
    ] = "mooncake_conversation"
    blocks: Annotated[_Count, Option("Capacity in blocks.", aliases=("kv_pool_size",))] = 10_000
    block_size: Annotated[_Count, Option("Tokens per block.", aliases=("kv_block_size",))] = 128
    manager: Annotated[
        bool, Option("Serve a KVCacheManager, which engines with a scheduler use, not a GPUKVPool.")
    ] = False
    live_curve: Annotated[
        bool, Option("Estimate the hit rates of larger and smaller pools, for kv-pool stats.")
    ] = False
    run_length: Annotated[_Count, Option("Length in blocks of the runs that fragmentation counts.")] = (
        DEFAULT_RUN_LENGTH
    )
    enable_defragmentation: Annotated[
        bool,
        _compacting(
            "Compact the pool while it runs. Default: on; --config can turn it off.",
            flags=("--enable-defragmentation",),
        ),
    ] = True
    defrag_threshold: Annotated[
        float,
        msgspec.Meta(ge=0, le=1),
        _compacting("Compact above this fragmentation rate; 1 for never."),
    ] = 0.1
    defrag_interval: Annotated[
        float, msgspec.Meta(ge=0), _compacting("Seconds between two checks of the rate.")
    ] = 1.0
    defrag_moves: Annotated[_Count, _compacting("Blocks moved per step of the engine.")] = 64
    max_evictions: Annotated[
        _Size,
        _compacting("Cached blocks that a step may evict instead of moving them."),
    ] = 0
    speedup: Annotated[
        float, msgspec.Meta(gt=0), Option("Factor by which requests arrive faster than in the trace.")
    ] = 1.0
    trace_block_size: Annotated[_Count | None, TRACE_BLOCK_SIZE] = None
    timestamp_unit: Annotated[Literal["ms", "s", "us", "ns"], TIME_UNIT] = "ms"
    duration: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        Option("Stop after this many seconds. Default: run until Ctrl-C."),
    ] = None
    socket: Annotated[str | None, Option("Path of the control socket. Default: a socket of this user.")] = (
        None
    )
    port: Annotated[
        str | None,
        _of_network(
            "Also answer health, metrics and reading commands on this TCP port; 0 for a free port.",
            metavar="[HOST:]PORT",
        ),
    ] = None
    token_file: Annotated[
        str | None,
        _of_network("The token that clients of the port send, 16 bytes or more.", metavar="FILE"),
    ] = None
    certificate: Annotated[
        str | None, _of_network("Serve the port over TLS with this PEM file.", metavar="FILE")
    ] = None
    key: Annotated[
        str | None, _of_network("The private key, if the file above does not have it.", metavar="FILE")
    ] = None
    web: Annotated[
        bool, _of_network("Serve a web page of the pool at the port, by default 127.0.0.1:9400.")
    ] = False
    name: Annotated[
        str | None,
        _of_nodes("Make the pool a node with this name; sequences can migrate to it and from it."),
    ] = None
    block_bytes: Annotated[
        _Count,
        _of_nodes(
            "Bytes per block of a node, or of a pool with tiers, such as 4KiB. The contents are made up.",
            metavar="SIZE",
            parse=parse_memory,
        ),
    ] = 4096
    listen: Annotated[
        str | None,
        _of_nodes(
            "Address at which other nodes reach this node; port 0 for a free port. Default: 127.0.0.1:0.",
            metavar="HOST:PORT",
        ),
    ] = None
    bulk_port: Annotated[
        int,
        _of_nodes("Port of the same host over which the backend tcp sends blocks. Default: 0, a free port."),
    ] = 0
    peer: Annotated[list[str], _of_nodes("Another node; may be repeated.", metavar="NAME=HOST:PORT")] = []
    nodes: Annotated[
        str | None,
        _of_nodes(
            "A TOML file that lists other nodes ([[peers]]) and the speed of links ([links.rack]).",
            metavar="FILE",
        ),
    ] = None
    registry: Annotated[
        str | None,
        _of_nodes("The node that keeps the list of all nodes. Default: this node.", metavar="NAME|HOST:PORT"),
    ] = None
    secret_file: Annotated[
        str | None,
        _of_nodes(
            "The secret shared by all nodes, 16 bytes or more. Default: a file of this user, created when "
            "needed, for nodes on one machine.",
            metavar="FILE",
        ),
    ] = None
    backend: Annotated[
        list[str],
        _of_nodes(
            "How other nodes read the blocks of this node: tcp, or nixl for RDMA. May be repeated, the "
            "preferred one first. Default: tcp."
        ),
    ] = []
    max_rate: Annotated[
        str | None,
        _of_nodes(
            "Maximum rate at which the node reads, such as 100MB/s. Default: no limit.", metavar="RATE"
        ),
    ] = None
    migration_threshold: Annotated[
        _Size,
        _of_nodes(
            "Migrate sequences to other nodes while fewer blocks than this are free; 0 for never.",
            metavar="BLOCKS",
        ),
    ] = 0
    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""
    host_tier: Annotated[
        _Size,
        _of_tiers("Keep up to this many evicted blocks in host memory.", metavar="BLOCKS"),
    ] = 0
    disk_tier: Annotated[
        str | None,
        _of_tiers(
            "Keep evicted blocks in this folder when host memory is full. They survive a restart.",
            metavar="FOLDER",
        ),
    ] = None
    disk_tier_blocks: Annotated[
        _Count | None,
        _of_tiers("Capacity of the disk tier. Default: ten times the pool's.", metavar="BLOCKS"),
    ] = None
    publish: Annotated[str | None, PUBLISH] = None
    publish_replay: Annotated[str | None, PUBLISH_REPLAY] = None
    publish_config: Annotated[str | None, PUBLISH_CONFIG] = None

    @property
    def network_port(self) -> NetworkPort | None:
        """The port of the options about the network. Raises InvalidArgumentError as `NetworkPort`."""
        if self.port is None and not self.web:
            if self.token_file or self.certificate or self.key:
                raise InvalidArgumentError(
                    "token_file, certificate and key are options of a port; set port, too"
                )
            return None
        token = None if self.token_file is None else Path(self.token_file)
        address = self.port or _WEB_PORT
        return NetworkPort.parse(address, token=token, certificate=self.certificate, key=self.key)

    @property
    def has_tiers(self) -> bool:
        """Whether the pool has lower tiers."""
        return bool(self.host_tier) or self.disk_tier is not None

    @property
    def has_bytes(self) -> bool:
        """Whether blocks need bytes, for other nodes or for tiers."""
        return self.name is not None or self.has_tiers


def read_settings(config: str | None, given: Mapping[str, object]) -> ServeSettings:
    """Return the settings of a TOML file, overridden by the values in `given` that are not None.

    Keys of the file are the fields of `ServeSettings`, at its top level, or aliases of their options:
    `kv_pool_size` is `blocks`.
    Raises:
        InvalidArgumentError: the file does not exist or is not TOML, a key is unknown, or a value is
            invalid; the message names the file and the key.
    """
    from_file = {} if config is None else _resolve(read_toml(config, "the settings"), f"{config}: ")
    from_command = _resolve({name: value for name, value in given.items() if value is not None}, "")
    if from_file:
        _convert(from_file, f"{config}: ")
    return _convert({**from_file, **from_command}, "")


def open_pool(config: str, **options: Any) -> tuple[GPUKVPool, Defragmenter]:
    """Return the pool that a TOML file describes, and its defragmenter.

        # pool.toml                             pool, defragmenter = open_pool("pool.toml", storage=storage)
        kv_pool_size = 10000                    ...
        kv_block_size = 16                      defragmenter.step()    # between two steps of the engine
        defrag_threshold = 0.2
        defrag_interval = 60

    The same file works for `kv-pool serve --config` and for an engine; this function checks but ignores the
    keys about traces and nodes.

    Args:
        options: arguments of `GPUKVPool`, such as `storage` and `on_moved`; they override the file.
    Raises:
        InvalidArgumentError: as `read_settings`.
    """
    settings = read_settings(config, {})
    pool = make_pool(settings, **options)
    return pool, make_defragmenter(settings, pool)


def make_pool(settings: ServeSettings, **options: Any) -> GPUKVPool:
    """Return a pool with these settings; see `open_pool`."""
    named: dict[str, Any] = {"run_length": settings.run_length, "live_curve": settings.live_curve}
    return GPUKVPool(settings.blocks, settings.block_size, **(named | options))


def make_defragmenter(
    settings: ServeSettings, pool: Defragmentable, clock: Callable[[], float] = monotonic
) -> Defragmenter:
    """Return a defragmenter of `pool` with these settings."""
    return Defragmenter(
        pool,
        threshold=settings.defrag_threshold if settings.enable_defragmentation else 1.0,
        interval_s=settings.defrag_interval,
        max_moves=settings.defrag_moves,
        max_evictions=settings.max_evictions,
        clock=clock,
    )


def check_is_node(settings: ServeSettings) -> None:
    """Raise InvalidArgumentError if an option about nodes is set without a name."""
    if settings.name is None:
        defaults = ServeSettings()
        for key, _, option in list_options(ServeSettings):
            is_set = getattr(settings, key) != getattr(defaults, key)
            if option.panel == _NODES and key != "block_bytes" and is_set:  # tiers have block_bytes, too
                raise InvalidArgumentError(
                    f"{key} is an option of nodes, and a node needs a name; set name, too"
                )


def _resolve(found: dict[str, object], where: str) -> dict[str, object]:
    """Return values by field name. Raises InvalidArgumentError for an unknown name, or two of one field."""
    known = ServeSettings.__struct_fields__
    values: dict[str, object] = {}
    for key, value in found.items():
        name = _OTHER_NAMES.get(key, key)
        if name not in known:
            raise InvalidArgumentError(f"{where}unknown key {key!r}; {describe_known(key, known)}")
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
