"""Block tables as text, and the calls of a scheduler's step in one line.

a: 1* 2*x2 3 / - 5 6      a slash separates groups; - null block; * cached; x2 two references
"""

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.manager.invariants import check_manager


def make_manager(groups, num_blocks=20, hash_block_size=4, **options):
    return KVCacheManager(BlockPool(num_blocks + 1, True, hash_block_size), groups=groups, **options)


def make_request(name, tokens, hash_block_size=4, **options):
    return Request(name, tokens, BlockHasher("sha256", "s", hash_block_size), **options)


def draw(manager, request):
    """Return the request's tables as text."""

    def draw_block(block):
        if block.is_null:
            return "-"
        star = "*" if block.block_hash is not None else ""
        return f"{block.block_id}{star}" + (f"x{block.ref_cnt}" if block.ref_cnt > 1 else "")

    tables = [manager.get_table(request.request_id, group_id) for group_id in range(len(manager.groups))]
    return " / ".join(" ".join(draw_block(block) for block in table.blocks) for table in tables)


def start(manager, request, num_tokens=None, **options):
    """Look up, allocate and count up to `num_tokens` tokens (all); return the hit tokens, or None."""
    prefix = manager.get_computed_blocks(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    if manager.allocate_slots(request, end - prefix.num_tokens, prefix, **options) is None:
        return None
    request.num_computed_tokens = end
    return prefix.num_tokens


def grow(manager, request, tokens=(), num_new=None, **options):
    """Append tokens, allocate and count all uncomputed ones; return False if they do not fit."""
    request.append_output_token_ids(list(tokens))
    num_new = request.num_tokens - request.num_computed_tokens if num_new is None else num_new
    if manager.allocate_slots(request, num_new, **options) is None:
        return False
    request.num_computed_tokens += num_new
    return True


def take_copies(manager):
    return [tuple(move) for move in manager.take_block_copies()]


def stop(manager, *requests):
    """End these requests, and check that no block is in use."""
    for request in requests:
        manager.free(request)
    assert manager.take_block_copies() == []
    check_manager(manager, [])
    assert manager.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
