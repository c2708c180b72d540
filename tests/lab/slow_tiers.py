"""A slow model of a replay with lower tiers, made of lists."""

from itertools import groupby

from lab.test_groups import SlowGroups


class SlowTiers(SlowGroups):
    """A model with one request at a time, a queue of device blocks, and an LRU list for each tier.

        find       the longest prefix on the device, then the longest prefix in tiers after it
        hold       mark the blocks to be read as used in every tier that has them; tiers cannot evict them
        take       allocate blocks for the hit and the first step; offload their old content to the first tier
        read       from the fastest tier that has the block; the block stays there
        cache      the block can be hit on the device again; tiers may evict it

    Blocks are stored in a tier in batches, one for each group's blocks that are allocated or cached together.
    The tier marks blocks that it already has as used, stores the others, and evicts as many blocks as exceed
    its capacity to the next tier, in one batch, or drops them.
    """

    def __init__(self, groups, capacity, block_size, chunk_tokens, capacities, write):
        super().__init__(groups, capacity, block_size, chunk_tokens)
        self.capacities = capacities
        self.writes_through = write == "through"
        self.tiers = [[] for _ in capacities]
        self.held = []
        names = ["blocks_hit", "tokens_hit", "blocks_written", "blocks_read", "evictions", "blocks_held"]
        self.tier_counts = [dict.fromkeys(names, 0) for _ in capacities]

    def store(self, level, contents):
        tier, counts, capacity = self.tiers[level], self.tier_counts[level], self.capacities[level]
        new = []
        for content in contents:
            if content in tier:
                tier.remove(content)
                tier.append(content)
            elif content not in new:
                new.append(content)
        while new:
            some, new = new[:capacity], new[capacity:]
            num_over = max(0, len(tier) + len(some) - capacity)
            outgoing = [content for content in tier if content not in self.held][:num_over]
            if outgoing and level + 1 < len(self.tiers):
                self.store(level + 1, outgoing)
            for content in outgoing:
                tier.remove(content)
            some = some[: capacity - len(tier)]
            tier.extend(some)
            counts["evictions"] += len(outgoing)
            counts["blocks_written"] += len(some)
            counts["blocks_held"] = len(tier)

    def find_level(self, content):
        return next((level for level, tier in enumerate(self.tiers) if content in tier), None)

    def find_tier_hit(self, ids, start, max_tokens):
        """Return the longest prefix in blocks, and for each group the blocks to read, by position."""
        for length in range(min(max_tokens // self.block_size, len(ids)), start, -1):
            rows = [
                {
                    position: (group, ids[position])
                    for position in range(
                        max(start, self.count_unneeded(group, length * self.block_size)), length
                    )
                }
                for group in range(len(self.groups))
            ]
            if all(self.find_level(content) is not None for row in rows for content in row.values()):
                return length, rows
        return start, [{} for _ in self.groups]

    def count_tier_hit(self, rows, start, length):
        for position in range(start, length):
            levels = [self.find_level(row[position]) for row in rows if position in row]
            counts = self.tier_counts[max(levels, default=0)]
            counts["blocks_hit"] += 1
            counts["tokens_hit"] += self.block_size

    def take_all(self, num_blocks):
        gone = [self.content_of[block] for block in self.queue[:num_blocks] if block in self.content_of]
        if gone:
            self.store(0, gone)
        return super().take_all(num_blocks)

    def cache(self, tables, ids, num_cached, end):
        num_before = len(self.holders)
        super().cache(tables, ids, num_cached, end)
        if self.writes_through:
            new = [content for content, _ in self.holders[num_before:]]
            for _, contents in groupby(new, key=lambda content: content[0]):
                self.store(0, list(contents))

    def read(self, contents):
        for content in contents:
            self.tier_counts[self.find_level(content)]["blocks_read"] += 1

    def run(self, traced):
        length, ids = traced["input_length"], traced["hash_ids"]
        ids = ids[: length // self.block_size]
        num_on_device, tables = self.find_hit(ids, length - 1)
        num_hits, rows = self.find_tier_hit(ids, num_on_device, length - 1)
        self.count_tier_hit(rows, num_on_device, num_hits)
        num_computed = num_hits * self.block_size
        wanted = [content for row in rows for content in row.values()]
        self.held = wanted
        for tier in self.tiers:
            for content in wanted:
                if content in tier:
                    tier.remove(content)
                    tier.append(content)
        unneeded = [self.count_unneeded(group, num_computed) for group in range(len(self.groups))]
        for group, table in enumerate(tables):
            tables[group] = {place: block for place, block in table.items() if place >= unneeded[group]}
            for block in tables[group].values():
                self.queue.remove(block)
        num_cached = [max(num_on_device, first) for first in unneeded]
        num_places = list(num_cached)
        self.extend(tables, num_places, num_computed)
        is_first = True
        while num_computed < length:
            end = self.find_end_of_step(num_computed, length)
            for group, table in enumerate(tables):
                first = self.count_unneeded(group, num_computed)
                self.free([table.pop(place) for place in sorted(table, reverse=True) if place < first])
            self.extend(tables, num_places, end)
            if is_first:
                self.read(wanted)
                self.cache(tables, ids, num_cached, num_hits * self.block_size)
                self.held = []
                is_first = False
            self.cache(tables, ids, num_cached, end)
            num_computed = end
            self.note_use(tables)
        self.finish(tables, num_hits)
