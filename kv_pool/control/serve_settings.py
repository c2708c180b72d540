"""`ServeSettings`: the settings of `kv-pool serve`, also from a TOML file; `open_pool`: a pool from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous.defragmenter import Defragmentable, Defragmenter
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.network_port import NetworkPort
from kv_pool.errors import InvalidArgumentError, describe_known
from kv_pool.option import describe_options, list_options, setting
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

_Count = Annotated[int, Meta(ge=1)]
_Size = Annotated[int, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]

_compacting = partial(setting, panel="Compaction")
_of_nodes = partial(setting, panel="Nodes")
_of_tiers = partial(setting, panel="Tiers")
_of_network = partial(setting, panel="Network")
_NEEDED = {"Nodes": ("name",), "Network": ("port", "web")}
"""The options of a panel of which one must be set for the others; tiers, too, have `block_bytes`."""


@describe_options
@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of a served pool, its replay, its node and its tiers.

    Attributes:
        network, rack, host, device: the location of the node. Defaults: the name of the host, and the device
            that `migration.machine.name_device` finds; network and rack are unknown unless they are set.
    """

    trace: str = setting(
        f"A trace file, or one of: {', '.join(BUNDLED_TRACES)}.",
        default="mooncake_conversation",
        metavar="TRACE",
        known=lambda: BUNDLED_TRACES,
        is_argument=True,
    )
    blocks: _Count = setting("Capacity in blocks.", default=10_000, aliases=("kv_pool_size",))
    block_size: _Count = setting("Tokens per block.", default=128, aliases=("kv_block_size",))
    manager: bool = setting(
        "Serve a KVCacheManager, which engines with a scheduler use, not a GPUKVPool.", default=False
    )
    run_length: _Count = setting(
        "Length in blocks of the runs that fragmentation counts.", default=DEFAULT_RUN_LENGTH
    )
    live_curve: bool = setting(
        "Estimate the hit rates of larger and smaller pools, for kv-pool stats.", default=False
    )
    enable_defragmentation: bool = _compacting(
        "Compact the pool while it runs. Default: on; --config can turn it off.",
        default=True,
        flags=("--enable-defragmentation",),
    )
    defrag_threshold: Annotated[float, Meta(ge=0, le=1)] = _compacting(
        "Compact above this fragmentation rate; 1 for never.", default=0.1
    )
    defrag_interval: Annotated[float, Meta(ge=0)] = _compacting(
        "Seconds between two checks of the rate.", default=1.0
    )
    defrag_moves: _Count = _compacting("Blocks moved per step of the engine.", default=64)
    max_evictions: _Size = _compacting(
        "Cached blocks that a step may evict instead of moving them.", default=0
    )
    speedup: _Positive = setting("Factor by which requests arrive faster than in the trace.", default=1.0)
    trace_block_size: _Count | None = setting(TRACE_BLOCK_SIZE, default=None)
    timestamp_unit: Literal["ms", "s", "us", "ns"] = setting(TIME_UNIT, default="ms")
    duration: _Positive | None = setting(
        "Stop after this many seconds. Default: run until Ctrl-C.", default=None
    )
    name: str | None = _of_nodes(
        "Make the pool a node with this name; sequences can migrate to it and from it.", default=None
    )
    listen: str | None = _of_nodes(
        "Address at which other nodes reach this node; port 0 for a free port. Default: 127.0.0.1:0.",
        default=None,
        metavar="HOST:PORT",
    )
    bulk_port: int = _of_nodes(
        "Port of the same host over which the backend tcp sends blocks. Default: 0, a free port.", default=0
    )
    peer: list[str] | None = _of_nodes(
        "Another node; may be repeated.", default=None, metavar="NAME=HOST:PORT"
    )
    nodes: str | None = _of_nodes(
        "A TOML file that lists other nodes ([[peers]]) and the speed of links ([links.rack]).",
        default=None,
        metavar="FILE",
    )
    registry: str | None = _of_nodes(
        "The node that keeps the list of all nodes. Default: this node.",
        default=None,
        metavar="NAME|HOST:PORT",
    )
    secret_file: str | None = _of_nodes(
        "The secret shared by all nodes, 16 bytes or more. Default: a file of this user, created when "
        "needed, for nodes on one machine.",
        default=None,
        metavar="FILE",
    )
    backend: list[str] | None = _of_nodes(
        "How other nodes read the blocks of this node: tcp, or nixl for RDMA. May be repeated, the "
        "preferred one first. Default: tcp.",
        default=None,
    )
    block_bytes: _Count = _of_nodes(
        "Bytes per block of a node, or of a pool with tiers, such as 4KiB. The contents are made up.",
        default=4096,
        metavar="SIZE",
        parse=parse_memory,
    )
    max_rate: str | None = _of_nodes(
        "Maximum rate at which the node reads, such as 100MB/s. Default: no limit.",
        default=None,
        metavar="RATE",
    )
    migration_threshold: _Size = _of_nodes(
        "Migrate sequences to other nodes while fewer blocks than this are free; 0 for never.",
        default=0,
        metavar="BLOCKS",
    )
    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""
    host_tier: _Size = _of_tiers(
        "Keep up to this many evicted blocks in host memory.", default=0, metavar="BLOCKS"
    )
    disk_tier: str | None = _of_tiers(
        "Keep evicted blocks in this folder when host memory is full. They survive a restart.",
        default=None,
        metavar="FOLDER",
    )
    disk_tier_blocks: _Count | None = _of_tiers(
        "Capacity of the disk tier. Default: ten times the pool's.", default=None, metavar="BLOCKS"
    )
    publish: str | None = setting(PUBLISH, default=None)
    publish_replay: str | None = setting(PUBLISH_REPLAY, default=None)
    publish_config: str | None = setting(PUBLISH_CONFIG, default=None)
    port: str | None = _of_network(
        "Also answer health, metrics and reading commands on this TCP port; 0 for a free port.",
        default=None,
        metavar="[HOST:]PORT",
    )
    token_file: str | None = _of_network(
        "The token that clients of the port send, 16 bytes or more.", default=None, metavar="FILE"
    )
    certificate: str | None = _of_network(
        "Serve the port over TLS with this PEM file.", default=None, metavar="FILE"
    )
    key: str | None = _of_network(
        "The private key, if the file above does not have it.", default=None, metavar="FILE"
    )
    web: bool = _of_network(
        "Serve a web page of the pool at the port, by default 127.0.0.1:9400.", default=False
    )
    socket: str | None = setting("Path of the control socket. Default: a socket of this user.", default=None)

    @property
    def network_port(self) -> NetworkPort | None:
        """The port of the options about the network. Raises InvalidArgumentError as `NetworkPort`."""
        if self.port is None and not self.web:
            return None
        token = None if self.token_file is None else Path(self.token_file)
        return NetworkPort.parse(self.port or "9400", token=token, certificate=self.certificate, key=self.key)

    @property
    def has_tiers(self) -> bool:
        """Whether the pool has lower tiers."""
        return bool(self.host_tier) or self.disk_tier is not None


def read_settings(config: str | None, given: Mapping[str, object]) -> ServeSettings:
    """Return the settings of a TOML file, overridden by the values in `given` that are not None.

    Keys of the file are the fields of `ServeSettings`, at its top level, or aliases of their options:
    `kv_pool_size` is `blocks`.
    Raises:
        InvalidArgumentError: the file does not exist or is not TOML, a key is unknown, or a value is
            invalid; the message names the file and the key.
    """
    from_file = {} if config is None else _check(read_toml(config, "the settings"), f"{config}: ")
    from_command = _check({name: value for name, value in given.items() if value is not None}, "")
    return ServeSettings(**from_file | from_command)


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


def check_panels(settings: ServeSettings) -> None:
    """Raise InvalidArgumentError for an option about nodes without a name, or about the port without one."""
    defaults = ServeSettings()
    for key, _, option in list_options(ServeSettings):
        needed = _NEEDED.get(option.panel or "", ())
        is_missing = needed and not any(getattr(settings, one) for one in needed)
        if is_missing and key != "block_bytes" and getattr(settings, key) != getattr(defaults, key):
            raise InvalidArgumentError(
                f"{key} is an option of the panel {option.panel}; set {' or '.join(needed)}, too"
            )


def _check(found: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return valid values by field name. Raises InvalidArgumentError."""
    known = [field.name for field in fields(ServeSettings)]
    values: dict[str, object] = {}
    for key, value in found.items():
        name = _OTHER_NAMES.get(key, key)
        if name not in known:
            raise InvalidArgumentError(f"{where}unknown key {key!r}; {describe_known(key, known)}")
        if name in values:
            raise InvalidArgumentError(f"{where}{key} is another name of {name}; give one of them")
        values[name] = value
    try:
        checked = msgspec.convert(values, ServeSettings)
    except msgspec.ValidationError as error:
        # "Expected `int` >= 1 - at `$.blocks`"
        problem, _, name = str(error).partition(" - at `$.")
        raise InvalidArgumentError(f"{where}{name.rstrip('`')}: {problem}") from error
    return {name: getattr(checked, name) for name in values}


_OTHER_NAMES = {alias: name for name, _, option in list_options(ServeSettings) for alias in option.aliases}
