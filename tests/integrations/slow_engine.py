"""nano-vllm's rules, as plainly as can be said: a slow block manager of lists and dicts, and a scheduler.

Both schedulers' rules are here: `eager` as in 2025, else as today. The scheduler drives the slow manager and
the real one alike.
"""


class SlowBlockManager:
    """A prefix is the tuple of all tokens up to a block's end; no hashes, so no two prefixes are confused.

    A block that is reused forgets its prefix. Of several blocks with one prefix the youngest is found, and
    when that one forgets, the others are not found again.
    """

    def __init__(self, num_blocks, block_size, eager):
        self.block_size = block_size
        self.eager = eager
        self.free = list(range(num_blocks))
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.found = {}  # prefix -> block id

    def prefixes(self, seq):
        """The prefixes that end with a full block, shortest first."""
        ends = range(self.block_size, len(seq) + 1, self.block_size)
        return [tuple(seq.token_ids[:end]) for end in ends]

    def hits(self, seq):
        prefixes = self.prefixes(seq)
        if not self.eager:
            prefixes = prefixes[: seq.num_blocks - 1]
        hits = []
        for prefix in prefixes:
            if prefix not in self.found:
                break
            hits.append(self.found[prefix])
        return hits

    def cache(self, seq, first, end):
        for index in range(first, end):
            self.found[self.prefixes(seq)[index]] = seq.block_table[index]

    def take(self, seq):
        block_id = self.free.pop(0)
        self.found = {prefix: held for prefix, held in self.found.items() if held != block_id}
        self.references[block_id] = 1
        seq.block_table.append(block_id)

    def can_allocate(self, seq):
        if self.eager:
            return seq.num_blocks <= len(self.free)
        hits = self.hits(seq)
        num_needed = seq.num_blocks - sum(block_id not in self.free for block_id in hits)
        return len(hits) if num_needed <= len(self.free) else -1

    def allocate(self, seq, num_cached_blocks=None):
        hits = self.hits(seq)[:num_cached_blocks]
        for block_id in hits:
            if block_id in self.free:
                self.free.remove(block_id)
            self.references[block_id] += 1
        seq.block_table.extend(hits)
        while len(seq.block_table) < seq.num_blocks:
            self.take(seq)
        seq.num_cached_tokens = len(hits) * self.block_size
        if self.eager:
            self.cache(seq, len(hits), len(seq) // self.block_size)

    def can_append(self, seq):
        return len(seq.block_table) == seq.num_blocks or bool(self.free)

    def may_append(self, seq):
        if len(seq.block_table) < seq.num_blocks:
            self.take(seq)
        if self.eager and len(seq) % self.block_size == 0:
            self.cache(seq, seq.num_blocks - 1, seq.num_blocks)

    def hash_blocks(self, seq):
        num_computed_tokens = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.cache(seq, seq.num_cached_tokens // self.block_size, num_computed_tokens // self.block_size)

    def deallocate(self, seq):
        while seq.block_table:
            block_id = seq.block_table.pop()
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.free.append(block_id)
        seq.num_cached_tokens = 0


class SmallScheduler:
    """Admits waiting sequences in order of arrival; if it admits none, each running one grows by a token.

    A sequence that cannot grow takes the blocks of the one admitted last, which then waits in front of all
    others. Today a prompt may be computed in several steps, if it is the first of its step.
    """

    def __init__(self, manager, eager, max_num_seqs, max_num_tokens):
        self.manager = manager
        self.eager = eager
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.waiting = []
        self.running = []

    def schedule(self):
        """The sequences of the next step, and whether they were admitted (or else grow by a token)."""
        admitted = self.admit()
        return (admitted, True) if admitted else (self.grow(), False)

    def admit(self):
        admitted = []
        budget = self.max_num_tokens
        while self.waiting and len(admitted) < self.max_num_seqs and budget > 0:
            seq = self.waiting[0]
            num_cached_blocks = self.find_room(seq)
            if num_cached_blocks is None:
                break
            # In 2025 hits are only known, and not paid for, once the sequence is admitted.
            num_tokens = len(seq) - max(seq.num_cached_tokens, num_cached_blocks * self.manager.block_size)
            if num_tokens > budget and (self.eager or admitted):
                break
            if self.eager:
                self.manager.allocate(seq)
                num_tokens = len(seq) - seq.num_cached_tokens
            elif not seq.block_table:
                self.manager.allocate(seq, num_cached_blocks)
            admitted.append(seq)
            seq.num_scheduled_tokens = min(num_tokens, budget)
            budget -= seq.num_scheduled_tokens
            if seq.num_scheduled_tokens == num_tokens:
                self.running.append(self.waiting.pop(0))
        return admitted

    def find_room(self, seq):
        """Return the number of blocks that it would hit, 0 if it is not known yet; None if it has to wait."""
        if seq.block_table:
            return 0
        answer = self.manager.can_allocate(seq)
        if self.eager:
            return 0 if answer else None
        return None if answer == -1 else answer

    def grow(self):
        grown = []
        while self.running and len(grown) < self.max_num_seqs:
            seq = self.running.pop(0)
            while not self.manager.can_append(seq) and self.running:
                self.preempt(self.running.pop())
            if not self.manager.can_append(seq):
                self.preempt(seq)
                break
            self.manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            grown.append(seq)
        self.running = grown + self.running
        return grown

    def preempt(self, seq):
        self.manager.deallocate(seq)
        seq.num_scheduled_tokens = 0
        self.waiting.insert(0, seq)

    def finish_step(self, seqs, token_ids):
        """A token for each sequence that is computed to its end; those that are long enough leave."""
        for seq, token_id in zip(seqs, token_ids, strict=True):
            if not self.eager:
                self.manager.hash_blocks(seq)
                seq.num_cached_tokens += seq.num_scheduled_tokens
                seq.num_scheduled_tokens = 0
                if seq.num_cached_tokens < len(seq):
                    continue
            seq.append_token(token_id)
            if len(seq) >= seq.max_num_tokens:
                self.manager.deallocate(seq)
                self.running.remove(seq)
