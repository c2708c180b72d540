"""`cut_into_segments`: from directives, which are about tokens, to the blocks of a table."""

from itertools import pairwise

from kv_pool.manager.retention.claim import Claim, add_claim


def cut_into_segments(
    ranges: list[tuple[int, int | None, Claim]], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Returns:
        (low, high, claims), in order and without gaps, counted from `first`.
    """
    stretches: list[tuple[int, int, Claim]] = []
    cuts = {0, num_blocks}
    for start, end, claim in ranges:
        low = max(0, start // block_size - first)
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        if low < high:
            stretches.append((low, high, claim))
            cuts.add(low)
            cuts.add(high)
    in_order = sorted(cuts)
    segments: list[tuple[int, int, tuple[Claim, ...]]] = []
    for low, high in pairwise(in_order):
        claims: tuple[Claim, ...] = ()
        for start_block, end_block, claim in stretches:
            if start_block <= low < end_block:
                claims = add_claim(claims, claim)
        segments.append((low, high, claims))
    return segments
