"""`AdapterInterrupts`: interrupted calls of a `GPUKVPool`."""

from collections import Counter

from lives.contents import BLOCK_SIZE
from lives.interrupts import Interrupts

from kv_pool import BlockAllocationRequest
from kv_pool.errors import FrozenSequenceError, PinLimitError, PinnedBlockError, PoolExhaustedError


class AdapterInterrupts(Interrupts):
    """The calls of an `AdapterNode` that can be interrupted."""

    def list_breakable(self):
        calls = [*super().list_breakable(), self.break_claim]
        if self.running:
            calls += [self.break_free, self.break_fork, self.break_cache, self.break_growth, self.break_pin]
        if self.pins:
            calls.append(self.break_unpin)
        return calls

    def settle(self):
        super().settle()
        self.gpu_pool.list_sequences()
        # An exception of a trace function after the last call in a `with` block skips the block's exit,
        # unlike one of a signal handler.
        lock = self.gpu_pool.lock
        while lock._is_owned():
            lock.release()

    def break_claim(self):
        sequence = self.world.make_sequence(self.world.draw_prompt())
        self.interrupt(lambda: self.gpu_pool.claim_prefix(sequence.number, sequence.request.block_hashes))
        if self.has_sequence(sequence):
            self.enter(self.running, sequence, 0)
            sequence.request.num_computed_tokens = len(self.tables[sequence]) * BLOCK_SIZE
        return "claim_prefix"

    def break_free(self):
        sequence = self.rng.choice(list(self.running))
        try:
            self.interrupt(lambda: self.gpu_pool.free_sequence(sequence.number))
        except PinnedBlockError:
            assert self.has_pins(sequence)
        if not self.has_sequence(sequence):
            self.leave(sequence)
        return "free_sequence"

    def break_fork(self):
        parent = self.rng.choice(list(self.running))
        num_computed = parent.request.num_computed_tokens
        child = self.world.make_sequence([*parent.request.all_token_ids[:num_computed], 0])
        num_blocks = -(-num_computed // BLOCK_SIZE)
        if num_blocks:
            self.interrupt(lambda: self.gpu_pool.fork(parent.number, child.number, num_blocks))
            if self.has_sequence(child):
                self.enter(self.running, child, num_computed)
        return "fork"

    def break_cache(self):
        sequence = self.rng.choice(list(self.running))
        self.interrupt(lambda: self.cache_prefix(sequence))
        return "cache_prefix"

    def break_growth(self):
        """Allocate one more block if that evicts no sequence."""
        sequence = self.rng.choice(list(self.running))
        if self.gpu_pool.get_free_blocks() > self.gpu_pool.reserved_blocks:
            request = BlockAllocationRequest(1, sequence.number, contiguous="no")
            try:
                self.interrupt(lambda: self.gpu_pool.allocate(request))
            except PoolExhaustedError:
                return "allocate, refused"
            block_ids = self.gpu_pool.blocks_of(sequence.number)
            assert block_ids[: len(self.tables[sequence])] == self.tables[sequence]
            self.tables[sequence] = block_ids
        return "allocate"

    def break_pin(self):
        block_id = self.rng.choice(self.tables[self.rng.choice(list(self.running))])
        try:
            self.interrupt(lambda: self.gpu_pool.pin([block_id]))
        except (PinLimitError, FrozenSequenceError):
            return "pin, refused"
        self.pins = Counter(self.gpu_pool._pins.counts)
        return "pin"

    def break_unpin(self):
        block = self.rng.choice(list(self.pins))
        self.interrupt(lambda: self.gpu_pool.unpin([block.block_id]))
        self.pins = Counter(self.gpu_pool._pins.counts)
        return "unpin"
