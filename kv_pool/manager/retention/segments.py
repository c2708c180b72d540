"""`cut_into_segments`: from directives, which are about tokens, to the blocks of a table."""

from itertools import pairwise

from kv_pool.manager.retention.claim import NO_CLAIMS, Claim, add_claim


def cut_into_segments(
    ranges: list[tuple[int, int | None, Claim]], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Returns:
        (low, high, claims), in order and without gaps, counted from `first`.
    """
    segments: list[tuple[int, int, tuple[Claim, ...]]] = []
    if len(ranges) == 1:  # as most have it
        start, end, claim = ranges[0]
        low = min(num_blocks, max(0, start // block_size - first))
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        high = max(low, high)
        if low > 0:
            segments.append((0, low, NO_CLAIMS))
        if high > low:
            segments.append((low, high, claim.alone))
        if num_blocks > high:
            segments.append((high, num_blocks, NO_CLAIMS))
        return segments
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
    for low, high in pairwise(in_order):
        claims = NO_CLAIMS
        for start_block, end_block, claim in stretches:
            if start_block <= low < end_block:
                claims = add_claim(claims, claim)
        segments.append((low, high, claims))
    return segments
