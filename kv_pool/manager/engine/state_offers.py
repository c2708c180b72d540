"""The states that a step leaves at boundaries, for connectors that copy them to other memory."""

from typing import Any

from kv_pool.ids import BlockId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.rule_caching import RuleCaching


def take_offers(caching: RuleCaching) -> dict[RequestId, list[tuple[int, BlockId, int]]]:
    """Return the states cached since the last call: request -> (group, block, tokens), by group."""
    taken: dict[RequestId, list[tuple[int, BlockId, int]]] = {}
    offers = sorted(caching.state_offers, key=lambda offer: offer[1])
    caching.state_offers = []
    for request_id, group_id, block, num_tokens in offers:
        taken.setdefault(request_id, []).append((group_id, block.block_id, num_tokens))
    return taken


def drop_offers(caching: RuleCaching, request_id: RequestId) -> None:
    """Drop the states of a request whose blocks are released."""
    if any(offer[0] == request_id for offer in caching.state_offers):
        caching.state_offers = [offer for offer in caching.state_offers if offer[0] != request_id]


def finish_tails(manager: KVCacheManager, request: Any) -> list[tuple[int, BlockId, int]]:
    """Return the states within a block that a finished request leaves: (group, block, tokens).

    Only those that no later token has overwritten. A second call returns [].
    """
    request_id: RequestId = request.request_id
    tables: list[BlockTable] = manager._tables.get(request_id, [])
    finished: list[tuple[int, BlockId, int]] = []
    for group, table in zip(manager._groups, tables, strict=False):
        num_tokens = table.tail_tokens
        table.tail_tokens = 0
        if num_tokens and not request.num_in_flight_tokens and request.num_computed_tokens == num_tokens:
            assert isinstance(group, MambaGroup)
            block = table.blocks[-(-num_tokens // group.block_size) - 1]
            finished.append((group.group_id, block.block_id, num_tokens))
    return finished
