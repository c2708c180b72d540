"""`ManagerLoads`: requests whose first tokens a transfer writes into leased blocks."""

from lives.contents import BLOCK_SIZE


class ManagerLoads:
    """A loading request has slots; its transfer writes them by block id, and goes on after an abort."""

    loading: dict  # sequence -> (its writer, how many of its tokens are on the device already)

    def begin_load(self):
        if not self.waiting or len(self.loading) > 2:
            return None
        sequence = self.rng.choice(self.waiting)
        request = sequence.request
        prefix = self.manager.get_computed_blocks(request)
        num_left = request.num_tokens - prefix.num_tokens
        if num_left < 2:
            return None
        num_loaded = self.rng.randint(1, num_left - 1)
        given = self.manager.allocate_slots(
            request, 0, prefix, num_external_computed_tokens=num_loaded, delay_cache_blocks=True
        )
        if given is None:
            return "refused"
        self.pool.flush_evicted()  # the transfer may write at once
        self.waiting.remove(sequence)
        start, end = prefix.num_tokens, prefix.num_tokens + num_loaded
        request.num_computed_tokens = end
        blocks, owed = [], []
        for group_id in range(len(self.groups)):
            table = self.manager.get_table(sequence.name, group_id).blocks
            blocks += [block for block in table[start // BLOCK_SIZE :] if not block.is_null]
            for position in range(start, end):
                block = table[position // BLOCK_SIZE]
                if not block.is_null:
                    value = sequence.values[position] + group_id
                    owed.append((block.block_id, position % BLOCK_SIZE, value))
        self.rng.shuffle(owed)
        writer = self.begin_writing(blocks, f"the load of {sequence.name}")
        writer.owed = owed
        self.loading[sequence] = writer, start
        self.world.tally["loads"] += 1
        return sequence.name

    def finish_writing(self, writer):
        super().finish_writing(writer)
        for sequence, (theirs, _) in list(self.loading.items()):
            if theirs is writer:
                del self.loading[sequence]
                request = sequence.request
                self.manager.cache_blocks(request, request.num_computed_tokens)
                self.running.append(sequence)
                self.world.tally["loaded"] += 1
                return
        self.world.tally["written after an abort"] += 1

    def abort_loading(self, sequence=None):
        """Free a loading request; its transfer goes on writing."""
        if sequence is None and self.loading:
            sequence = self.rng.choice(list(self.loading))
        if sequence is not None:
            del self.loading[sequence]
            self.manager.free(sequence.request)
            sequence.request.num_computed_tokens = 0
            self.waiting.append(sequence)

    def list_load_operations(self):
        return {self.begin_load: 3 if self.waiting else 0, self.abort_loading: 0.6 if self.loading else 0}
