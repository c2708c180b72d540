"""`TierEventLog`: the events of the tiers, in vLLM's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.integrations.vllm.connector.tier_index import TierIndex
from kv_pool.tiers.tier import GroupKeys

_UNKNOWN: dict[str, Any] = dict.fromkeys(("parent_block_hash", "lora_id", "lora_name"))
_UNKNOWN |= {"token_ids": (), "block_size": 0}


class TierEventLog:
    """Collects a BlockStored or BlockRemoved for each block that enters or leaves a tier.

    A block that was found on disk at the start is published with its hash only: no tokens, and a
    `block_size` of 0.

    Args:
        kv_cache_config: the engine's configuration, for the kinds of its groups.
        index: what the tiers hold.
    """

    def __init__(self, kv_cache_config: Any, index: TierIndex) -> None:
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._index = index
        self._num_to_sweep_at = 2 * sum(tier.capacity for tier in index.tiers)
        self._events: list[Any] = []
        # The events' fields about the block's content.
        self._labels: dict[BlockHashWithGroupId, dict[str, Any]] = {}

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def on_planned(self, request: Any, group: GroupKeys, position: int, key: BlockHashWithGroupId) -> None:
        """Note the content of a block whose store is planned; `position` is that in the block table."""
        if len(self._labels) > self._num_to_sweep_at:
            self._labels = {key: label for key, label in self._labels.items() if self._index.knows(key)}
        start = position * group.block_size
        end = start + group.block_size
        parent = group.list_keys(request, position - 1, position)[0] if position else None
        adapter = request.lora_request
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        self._labels[key] = {
            "parent_block_hash": None if parent is None else maybe_convert_block_hash(get_block_hash(parent)),
            "token_ids": tuple(request.all_token_ids[start:end]),
            "block_size": group.block_size,
            "lora_id": None if adapter is None else adapter.adapter_id,
            "lora_name": None if adapter is None else adapter.name,
            "extra_keys": to_event_extra_keys(extra_keys and [extra_keys]),
        }

    def announce_stored(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `TierListener`."""
        for key in keys:
            group_id = get_group_id(key)
            spec = self._specs[group_id]
            label = self._labels.get(key, _UNKNOWN)
            # Each event has a list of tokens of its own: a reader may change it.
            own = {**label, "token_ids": list(label["token_ids"])}
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=medium,
                    group_idx=group_id,
                    kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                    kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                    **own,
                )
            )

    def announce_removed(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `TierListener`."""
        for key in keys:
            self._events.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=medium,
                    group_idx=get_group_id(key),
                )
            )
