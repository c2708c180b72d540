"""`find_common_hit`: the longest cached prefix that all KV cache groups of a request can go on from.

`check_prefix`: that prefix is still cached when the request is admitted.
"""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockHash
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.requests.request import SchedulableRequest


def find_common_hit(
    groups: list[BlockGroup], block_hashes: list[BlockHash], max_num_tokens: int
) -> tuple[list[list[KVCacheBlock]], int]:
    """The blocks of that prefix, a list for each group (empty for one without prefixes), and its tokens.

    Each group accepts a length or proposes the next shorter one that it has; they are asked in turn until
    none objects. Lengths only fall, so that ends, and at the longest one that all accept. Only looks.
    """
    if len(groups) == 1 and groups[0].is_cacheable and max_num_tokens > 0:
        blocks, num_tokens = groups[0].find_longest_hit(groups[0].list_hashes(block_hashes), max_num_tokens)
        return [blocks], num_tokens
    num_tokens = max_num_tokens if any(group.is_cacheable for group in groups) else 0
    found: list[list[KVCacheBlock]] = [[] for _ in groups]
    accepted = [-1] * len(groups)
    changed = True
    while changed and num_tokens > 0:
        changed = False
        # Those whose blocks are found from the head on need one look only; they bound the others.
        for is_first_pass in (True, False):
            for index, group in enumerate(groups):
                if not group.is_cacheable or group.is_downward_closed != is_first_pass:
                    continue
                if accepted[index] == num_tokens:
                    continue
                if accepted[index] > num_tokens and is_first_pass:
                    accepted[index] = num_tokens - num_tokens % group.alignment
                    if accepted[index] != num_tokens:
                        num_tokens = accepted[index]
                        changed = True
                    continue
                hashes = group.list_hashes(block_hashes)
                found[index], accepted[index] = group.find_longest_hit(hashes, num_tokens)
                if accepted[index] != num_tokens:
                    num_tokens = accepted[index]
                    changed = True
    for index, group in enumerate(groups):
        if num_tokens <= 0 or not group.is_cacheable:
            found[index] = []
        else:
            del found[index][num_tokens // group.block_size :]
    return found, max(0, num_tokens)


def check_prefix(
    request: SchedulableRequest,
    prefix: CachedPrefix,
    has_blocks: bool,
    groups: list[BlockGroup],
    pool: BlockPoolCore,
) -> None:
    """Raise unless the prefix is this request's, which has no blocks yet, and is still cached."""
    if prefix.request_id != request.request_id:
        raise InvalidArgumentError(
            f"the cached prefix was found for request {prefix.request_id!r}, not {request.request_id!r}"
        )
    if has_blocks or (prefix.num_tokens and request.num_computed_tokens):
        raise InvalidArgumentError(
            f"request {request.request_id!r} has blocks already; a cached prefix, even an empty one, is for "
            "one that has none. Are there two requests with this id?"
        )
    if len(prefix.blocks) != len(groups):
        raise InvalidArgumentError(
            f"the cached prefix has {len(prefix.blocks)} groups, this manager {len(groups)}"
        )
    if prefix.num_evictions == pool.num_evictions:
        return
    hashes = request.block_hashes
    for group in groups:
        for position, block in enumerate(prefix.blocks[group.group_id]):
            if block.is_null:
                continue
            block_hash = hashes[(position + 1) * group.stride - 1]
            if block.block_hash != make_block_hash_with_group_id(block_hash, group.group_id):
                raise InvalidBlockError(
                    f"block {block.block_id}, position {position} of the cached prefix of request "
                    f"{request.request_id!r}, has been given to somebody else since; look it up again"
                )
