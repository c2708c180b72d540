"""The expected results of a manager, computed for each call from the definitions, by scanning all blocks."""

from dataclasses import dataclass
from math import lcm

from manager.token_engine import find_first_read

from kv_pool import AllocStatus, EncoderOnlyAttentionSpec, MambaSpec, SlidingWindowSpec
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.manager.retention.claims import PINNED


def count_blocks(spec, num_tokens):
    return -(-num_tokens // spec.block_size)


def find_first_kept(spec, num_computed):
    """Return the first table entry that the token after the computed ones reads."""
    if isinstance(spec, MambaSpec):
        return max(0, num_computed - 1) // spec.block_size
    return find_first_read(spec, num_computed) // spec.block_size


def find_needed(spec, num_tokens):
    """Return the entries that a request needs to continue after `num_tokens` tokens."""
    end = num_tokens // spec.block_size
    first = find_first_kept(spec, num_tokens)
    if isinstance(spec, SlidingWindowSpec):
        first = min(first, end - 1)  # vLLM's rule: even a window of one token hits a block
    return range(first, end)


def count_longest_hit(manager, request, max_num_tokens):
    """Count the tokens of the longest prefix whose needed blocks carry their hashes; tries each length."""
    pool = manager.block_pool
    specs = [(group_id, spec) for group_id, spec in enumerate(manager.groups) if spec.is_cacheable]
    if not specs or not pool.enable_caching:
        return 0
    cached = {block.block_hash for block in pool.blocks if block.block_hash is not None}

    def is_cached(group_id, spec, position):
        index = (position + 1) * (spec.block_size // pool.hash_block_size) - 1
        hashes = request.block_hashes
        return index < len(hashes) and make_block_hash_with_group_id(hashes[index], group_id) in cached

    def is_hit(num_tokens):
        return all(
            num_tokens % spec.block_size == 0
            and all(is_cached(group_id, spec, position) for position in find_needed(spec, num_tokens))
            for group_id, spec in specs
        )

    # No lookup reaches beyond the tokens whose hashes are known.
    most = min(max_num_tokens, len(request.block_hashes) * pool.hash_block_size)
    return next((num_tokens for num_tokens in range(most, 0, -1) if is_hit(num_tokens)), 0)


def list_to_cache(manager, request, num_new, num_before):
    """Yield the (group, position) pairs to be cached by an allocation: filled by it, and needed for a hit."""
    num_tokens = min(num_before + num_new, request.num_tokens, manager.max_model_len)
    specs = [(group_id, spec) for group_id, spec in enumerate(manager.groups) if spec.is_cacheable]
    alignment = lcm(*(spec.block_size for _, spec in specs))
    for end in range(alignment, num_tokens + 1, alignment):
        for group_id, spec in specs:
            if end <= num_before or (isinstance(spec, MambaSpec) and end != num_tokens):
                continue
            for position in find_needed(spec, end):
                if position >= num_before // spec.block_size:
                    yield group_id, position


@dataclass
class Expected:
    """The expected result of a call to `allocate_slots`."""

    status: AllocStatus
    num_taken: int
    """Free blocks that are taken, minus blocks that become free."""
    num_released: int
    """Blocks that left a window: released even if the tokens do not fit."""
    released: list[int]
    """Ids of the blocks that left a window, in the order of their reuse."""
    num_before: int
    """Tokens before the new ones."""
    num_entries: list[int]
    """Entries of each group's table afterwards."""
    waits: bool
    """It fits, but its prefix ends with a state that only this step writes."""


def expect_allocation(
    manager,
    request,
    num_new,
    prefix=None,
    *,
    num_lookahead_tokens=0,
    num_external_computed_tokens=0,
    num_encoder_tokens=0,
    full_sequence_must_fit=False,
    reserved_blocks=0,
    unwritten=frozenset(),
    max_model_len=None,
    **_,
):
    """Compute the result group by group. `unwritten`: keys of states that this step writes."""

    def limit(num_tokens):
        return num_tokens if max_model_len is None else min(num_tokens, max_model_len)

    num_free = manager.get_num_free_blocks()  # first: pins that expire here free blocks of the prefix
    has_blocks = manager.holds_blocks(request.request_id)
    num_hit = 0 if prefix is None else prefix.num_tokens
    num_before = request.num_computed_tokens + num_hit + num_external_computed_tokens
    num_usable = manager.block_pool.num_gpu_blocks - 1
    num_taken = num_released = num_held = num_full = num_full_held = 0
    num_entries = []
    released = []
    waits = False
    for group_id, spec in enumerate(manager.groups):
        is_state = isinstance(spec, MambaSpec)
        if isinstance(spec, EncoderOnlyAttentionSpec):
            wanted = most = 0
        elif not spec.is_cacheable:
            wanted = most = count_blocks(spec, num_encoder_tokens)
        else:
            lookahead = 0 if is_state else num_lookahead_tokens
            wanted = count_blocks(spec, limit(num_before + num_new + lookahead))
            most = count_blocks(spec, limit(request.num_tokens))
            most = min(2, most) if is_state else most
        first = find_first_kept(spec, num_before) if spec.is_cacheable else 0
        if has_blocks:
            blocks = manager.get_table(request.request_id, group_id).blocks
            gone = [block for block in blocks[:first] if not block.is_null]
            num_released += sum(
                block.ref_cnt == 1 and not is_pinned(manager, request, group_id, blocks.index(block), block)
                for block in gone
            )
            released += [block.block_id for block in reversed(gone)]
            num_free_hits = 0
        else:
            hits = [] if prefix is None else prefix.blocks[group_id]
            blocks = [None] * min(first, len(hits)) + hits[first:] + [None] * (first - len(hits))
            num_free_hits = sum(is_free(manager, block) for block in hits[first:])
            waits = waits or any(block.block_hash in unwritten for block in hits[-1:])
        kept = [block for block in blocks[first:] if not block.is_null]
        num_now = len(blocks)
        num_new_blocks = 0
        if not has_blocks and is_state and num_external_computed_tokens:
            # One block for the external state, and one for the state that the step writes.
            num_new_blocks += count_blocks(spec, num_before) > num_now
            num_now = max(num_now, count_blocks(spec, num_before))
        num_new_blocks += min(1, max(0, wanted - num_now)) if is_state else max(0, wanted - num_now)
        num_copied = 0
        if has_blocks and spec.is_cacheable:
            first_written = num_before // spec.block_size  # a full block is not written again
            if is_state:
                first_written = max(first_written, wanted - 1)
            # A request may write to a block that it holds alone, except for pending copies of the block.
            copied = set(manager.copies._source_of.values())
            num_copied = sum(block.ref_cnt - (block in copied) > 1 for block in blocks[first_written:])
        num_taken += num_new_blocks + num_copied + num_free_hits
        num_held += len(kept) + num_new_blocks
        num_full += max(0, most - len(blocks)) + num_free_hits
        num_full_held += max(0, most - len(blocks)) + len(kept)
        num_entries.append(max(num_now, wanted))
    left = 0 if has_blocks or not manager.list_request_ids() else manager.watermark_blocks
    available = num_free - left
    fits = num_taken <= available + num_released - reserved_blocks
    fits_alone = num_held + reserved_blocks <= num_usable
    if full_sequence_must_fit:
        fits = fits and num_full <= available
        fits_alone = fits_alone and num_full_held <= num_usable
    status = AllocStatus.OK if fits else AllocStatus.LATER if fits_alone else AllocStatus.NEVER
    waits = waits and status is AllocStatus.OK
    if waits:
        status = AllocStatus.LATER
    return Expected(status, num_taken - num_released, num_released, released, num_before, num_entries, waits)


def is_pinned(manager, request, group_id, position, block):
    """Return True if the block would stay pinned after its last holder releases it."""
    retention = manager.retention
    if retention is None or block.block_hash is None:
        return False
    first = position * manager.groups[group_id].block_size
    tokens = range(first, first + manager.groups[group_id].block_size)
    promised = retention._promised.get(request.request_id, ())
    directives = [
        claim
        for start, end, claim in retention._ranges.get(request.request_id, [])
        if any(start <= token and (end is None or token < end) for token in tokens)
        and (claim.strength != PINNED or (group_id, position) in promised)
    ]
    claims = retention._placed.get_claims(block)
    return any(claim.strength == PINNED for claim in [*claims, *directives])


def is_free(manager, block):
    """Return True if the block has no reference."""
    return not block.is_null and block.ref_cnt == 0


def count_free_blocks(manager):
    """Count by a full scan."""
    return sum(is_free(manager, block) for block in manager.block_pool.blocks)
