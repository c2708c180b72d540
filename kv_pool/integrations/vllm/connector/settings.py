"""`ConnectorSettings`: the connector's part of `--kv-transfer-config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.quantities import parse_memory


class ConnectorSettings(msgspec.Struct, frozen=True):
    """The keys of `kv_connector_extra_config`.

    Attributes:
        host_bytes: host memory for blocks, all ranks of an engine together; 0 for no tiers.
        disk_bytes: size of the disk tier, all ranks together; 0 for none. Needs `host_bytes`.
        disk_folder: folder of the disk tier; each model, layout and rank has its own folder in it.
        weights: version of the model's weights, such as a revision or a digest. Blocks on disk are only used
            with the same weights.
        lease_s: time in seconds after which blocks that a store still reads may be reused; what the store
            has read is then dropped. Only with kv_pool's pool.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_folder: str = ""
    weights: str = ""
    lease_s: float = 300.0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ConnectorSettings:
        """Return the settings of a `kv_connector_extra_config`.

        Raises:
            InvalidArgumentError: an unknown key, a size that cannot be parsed, or keys that do not fit
                together.
            InvalidTypeError: a value of the wrong type.
        """
        unknown = sorted(set(config) - set(cls.__struct_fields__))
        if unknown:
            raise InvalidArgumentError(
                f"kv_connector_extra_config has unknown keys {', '.join(unknown)}; KVPoolConnector takes "
                f"{', '.join(cls.__struct_fields__)}"
            )
        values = dict(config)
        for name in ("host_bytes", "disk_bytes"):
            if name in values:
                values[name] = parse_bytes(name, values[name])
        try:
            settings = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise InvalidTypeError(f"kv_connector_extra_config: {error}") from None
        if bool(settings.disk_bytes) != bool(settings.disk_folder):
            raise InvalidArgumentError(
                f"disk_bytes is {settings.disk_bytes} and disk_folder is {settings.disk_folder!r}; give both "
                "or neither"
            )
        if settings.disk_bytes and not settings.host_bytes:
            raise InvalidArgumentError(
                "disk_bytes is given without host_bytes; blocks reach the disk through host memory"
            )
        if not settings.lease_s > 0:
            raise InvalidArgumentError(f"lease_s is {settings.lease_s}; it must be above 0")
        return settings


def parse_bytes(name: str, value: object) -> int:
    """Return a number of bytes, given as an integer or as text such as `16GiB`.

    Raises:
        InvalidArgumentError: negative, or text that is not a size.
        InvalidTypeError: neither an integer nor text.
    """
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__index__")):
        raise InvalidTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}; expected int or str, such as '16GiB'"
        )
    if not isinstance(value, str):
        return as_count(name, value)
    try:
        return parse_memory(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None


def count_blocks(name: str, num_bytes: int, num_ranks: int, block_bytes: int) -> int:
    """Return how many blocks of `block_bytes` each of `num_ranks` ranks can store in `num_bytes` in total.

    0 bytes are for no tier.

    Raises:
        InvalidArgumentError: not a single block fits.
    """
    num_blocks = num_bytes // num_ranks // block_bytes
    if num_bytes and not num_blocks:
        raise InvalidArgumentError(
            f"{name} is {num_bytes} bytes for {num_ranks} ranks, but a block of one rank has {block_bytes} "
            f"bytes; give at least {num_ranks * block_bytes}"
        )
    return num_blocks
