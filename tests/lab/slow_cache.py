"""The reference model of a replay with the instant clock, slow and over lists."""


class SlowCache:
    """The reference model in four steps over lists: the free queue, and the blocks of each id by age."""

    def __init__(self, capacity, block_size, convention):
        self.capacity = capacity
        self.block_size = block_size
        self.convention = convention
        self.queue = list(range(capacity))
        self.id_of = {}
        self.holders = []  # (hash id, block), the oldest first
        self.counts = dict.fromkeys(
            [
                "requests",
                "refused_requests",
                "blocks_looked_up",
                "blocks_hit",
                "tokens_in",
                "tokens_hit",
                "evictions",
                "peak_blocks_in_use",
            ],
            0,
        )
        self.sum_rates = 0.0
        self.sum_in_use = 0

    def run(self, traced):
        length, ids = traced["input_length"], traced["hash_ids"]
        if self.convention.startswith("ids_as_blocks"):
            cacheable, num_physical, max_hit = ids, len(ids), len(ids)
        else:
            cacheable = ids[: length // self.block_size]
            num_physical, max_hit = -(-length // self.block_size), length // self.block_size
        if self.convention.endswith("_cap"):
            max_hit = (length - 1) // self.block_size
        counts = self.counts
        counts["requests"] += 1
        counts["tokens_in"] += length
        counts["blocks_looked_up"] += len(cacheable)
        if num_physical > self.capacity:
            counts["refused_requests"] += 1
            return
        table = []
        for hash_id in cacheable[:max_hit]:
            found = [block for held_id, block in self.holders if held_id == hash_id]
            if not found:
                break
            table.append(found[0])
        num_hits = len(table)
        for block in table:
            self.queue.remove(block)
        while len(table) < num_physical:
            block = self.queue.pop(0)
            if block in self.id_of:
                counts["evictions"] += 1
                self.holders.remove((self.id_of.pop(block), block))
            table.append(block)
        for block, hash_id in list(zip(table, cacheable, strict=False))[num_hits:]:
            self.id_of[block] = hash_id
            self.holders.append((hash_id, block))
        tail_first = table[::-1]
        unhashed = [block for block in tail_first if block not in self.id_of]
        self.queue = unhashed + self.queue + [block for block in tail_first if block in self.id_of]
        tokens_hit = min(length, num_hits * self.block_size)
        counts["blocks_hit"] += num_hits
        counts["tokens_hit"] += tokens_hit
        counts["peak_blocks_in_use"] = max(counts["peak_blocks_in_use"], num_physical)
        self.sum_rates += tokens_hit / length
        self.sum_in_use += num_physical
