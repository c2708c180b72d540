"""Block counts for a sequence from its start, and for an append."""

from kv_pool.errors import InvalidArgumentError


def count_required_blocks(num_tokens: int, num_lookahead_slots: int, block_size: int) -> int:
    """Return the blocks of a sequence of `num_tokens` tokens followed by `num_lookahead_slots` slots.

    >>> count_required_blocks(8, 0, block_size=4), count_required_blocks(8, 1, block_size=4)
    (2, 3)

    Raises:
        InvalidArgumentError: a negative count, or a block size below 1.
    Contract: `get_num_required_blocks` of vLLM v0.
    """
    _check_counts(num_tokens, num_lookahead_slots, block_size)
    return -(-(num_tokens + num_lookahead_slots) // block_size)


def count_blocks_touched_by_append(
    num_tokens_held: int, num_new_tokens: int, num_lookahead_slots: int, block_size: int
) -> int:
    """Count the blocks that the appended tokens and the lookahead slots after them fall into, new or not.

        |  0  1  2  3 |  4  5  .  . |  .  .  .  . |      6 tokens held, block size 4:
                               ^  ^    ^                 3 more touch 2 blocks

    >>> count_blocks_touched_by_append(6, 3, 0, block_size=4), count_blocks_touched_by_append(6, 2, 0, 4)
    (2, 1)

    Raises:
        InvalidArgumentError: a negative count, or a block size below 1.
    Contract: `get_num_blocks_touched_by_append_slots` of vLLM v0, with the same result except for an append
    of nothing after a partly filled block: it touches no block, where vLLM v0 returns 1.
    """
    _check_counts(num_tokens_held, num_lookahead_slots, block_size)
    _check_counts(num_new_tokens, num_lookahead_slots, block_size)
    end = num_tokens_held + num_new_tokens + num_lookahead_slots
    if end == num_tokens_held:
        return 0
    return -(-end // block_size) - num_tokens_held // block_size


def _check_counts(num_tokens: int, num_lookahead_slots: int, block_size: int) -> None:
    if num_tokens < 0 or num_lookahead_slots < 0:
        raise InvalidArgumentError(
            f"{num_tokens} tokens, {num_lookahead_slots} lookahead slots: neither can be negative"
        )
    if block_size < 1:
        raise InvalidArgumentError(f"a block has {block_size} tokens; block_size must be 1 or more")
