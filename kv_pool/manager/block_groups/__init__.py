"""The kinds of attention: the blocks that each keeps, needs for a hit, and caches."""
