"""`AdapterNode`: an engine over a `GPUKVPool`, with block ids and sequence ids."""

from collections import Counter

import numpy as np
from lives.contents import BLOCK_SIZE, HASHER, MOST_TOKENS
from lives.node import Node, count_filled

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.errors import (
    CopyFailedError,
    FrozenSequenceError,
    PinLimitError,
    PinnedBlockError,
    PoolExhaustedError,
)
from kv_pool.manager.sequences.victims import LRUEviction
from kv_pool.migration.pool_sequences import PoolSequences
from kv_pool.migration.pool_site import PoolSite

NUM_BLOCKS = 20


class AdapterNode(Node):
    """A sequence is in `running`, `loading` or `leaving`, or at the other node.

    Attributes:
        tables: block ids of each sequence, kept up to date by relocations as an engine does it.
        pins: how often each block is pinned.
    """

    def __init__(self, world, name, shape, folder):
        super().__init__(world, name, NUM_BLOCKS, folder)
        self.tables, self.loading, self.running, self.leaving = {}, {}, {}, {}
        self.pins = Counter()
        device = self.make_device(None)
        self.gpu_pool = GPUKVPool(
            NUM_BLOCKS,
            BLOCK_SIZE,
            storage=device.storage,
            reserved_blocks=2,
            max_pinned_blocks=5,
            eviction_policy=world.rng.choice((None, LRUEviction())),
            on_evicted=self.note_evicted,
            on_moved=self.note_moved,
            run_length=4,
            enable_kv_cache_events=True,
            clock=world.read_clock,
        )
        device.pool = self.gpu_pool.block_pool
        site = PoolSite(PoolSequences(self.gpu_pool), hasher=HASHER, clock=world.read_clock)
        self.open(device.pool, site, device)
        self.open_tiers()

    # ---- sequences -------------------------------------------------------------------------------

    def start(self):
        """Start a sequence with the prefix on the device and in the tiers, and compute the rest."""
        sequence = self.world.make_sequence(self.world.draw_prompt())
        hashes = sequence.request.block_hashes
        ids = self.gpu_pool.claim_prefix(sequence.number, hashes, self.draw_priority())
        self.enter(self.running, sequence, len(ids) * BLOCK_SIZE)
        num_tokens = sequence.request.num_tokens
        if self.take(sequence, num_tokens) is None:
            if sequence in self.running and ids:
                self.free(sequence)
            self.leave(sequence)
            return "refused"
        num_hits = len(ids)
        keys = []
        for block_hash in hashes[num_hits:]:
            key = make_block_hash_with_group_id(block_hash, 0)
            if key not in self.cache:
                break
            keys.append(key)
        num_read = 0
        if keys:
            self.cache.hold(keys)
            failed = self.cache.load(keys, self.tables[sequence][num_hits : num_hits + len(keys)])
            self.cache.release(keys)
            # Pending blocks that did not fit beside held ones are lost.
            num_read = next((at for at, key in enumerate(keys) if key in failed), len(keys))
        self.world.tally["hit"] += bool(num_hits)
        self.world.tally["from tiers"] += bool(num_read)
        self.compute(sequence, (num_hits + num_read) * BLOCK_SIZE, num_tokens)
        return sequence.number

    def compute(self, sequence, start, end):
        self.cache.flush()
        self.device.write(self.tables[sequence], sequence, start, end)
        sequence.request.num_computed_tokens = end
        if self.world.chance(0.8):
            self.cache_prefix(sequence)

    def cache_prefix(self, sequence):
        num_full = sequence.request.num_computed_tokens // BLOCK_SIZE
        self.gpu_pool.cache_prefix(sequence.number, sequence.request.block_hashes[:num_full])

    def take(self, sequence, num_tokens):
        """Allocate blocks for `num_tokens` tokens in all; None if that fails. May evict and move."""
        num_blocks = -(-num_tokens // BLOCK_SIZE) - len(self.tables[sequence])
        if num_blocks <= 0:
            return []
        self.break_copies(0.1)
        request = BlockAllocationRequest(
            num_blocks,
            sequence.number,
            contiguous=self.rng.choice(("require", "prefer", "no")),
            max_moves=self.rng.choice((None, 0, 2)),
            priority=self.draw_priority(),
        )
        try:
            ids = self.gpu_pool.allocate(request)
        except PoolExhaustedError:
            return None
        except CopyFailedError:
            return None
        finally:
            self.device.copy.num_good = None
        self.tables[sequence] += ids
        return ids

    def grow(self):
        """Compute more tokens; a shared block is copied before it is written."""
        if not self.running:
            return None
        sequence = self.rng.choice(list(self.running))
        request = sequence.request
        start = request.num_computed_tokens
        if request.num_tokens >= MOST_TOKENS:
            return self.free(sequence)
        if not sequence.num_left:
            sequence.append(self.world.draw_tokens(self.rng.randint(1, 5)))
        if start % BLOCK_SIZE and not self.make_writable(sequence):
            return "not writable"
        if self.take(sequence, request.num_tokens) is None:
            return "refused"
        self.compute(sequence, start, request.num_tokens)
        return sequence.number

    def make_writable(self, sequence):
        """Let the sequence hold the only reference on its last block; False if that fails."""
        position = sequence.request.num_computed_tokens // BLOCK_SIZE
        block_id = self.tables[sequence][position]
        if self.gpu_pool.get_block_info(block_id).ref_count == 1:
            return True
        if self.pool.blocks[block_id] in self.pins or position == 0:
            return False
        row = self.device.kv[block_id].copy()
        end = sequence.request.num_computed_tokens
        self.free_tail(sequence, position)
        if self.take(sequence, end) is None:
            return False
        self.cache.flush()
        self.device.kv[self.tables[sequence][position]] = row
        sequence.request.num_computed_tokens = end
        self.world.tally["copied on write"] += 1
        return True

    def fork(self):
        if not self.running or len(self.running) > 6:
            return
        parent = self.rng.choice(list(self.running))
        num_computed = parent.request.num_computed_tokens
        most = -(-num_computed // BLOCK_SIZE)
        num_blocks = self.rng.randint(1, most)
        num_common = min(num_computed, num_blocks * BLOCK_SIZE)
        tokens = [*parent.request.all_token_ids[:num_common], *self.world.draw_tokens(1)]
        child = self.world.make_sequence(tokens)
        ids = self.gpu_pool.fork(parent.number, child.number, num_blocks)
        self.enter(self.running, child, num_common)
        assert ids == self.tables[child]
        self.world.tally["forked"] += 1

    def free(self, sequence=None):
        """Free a sequence, or its tail."""
        if sequence is None and self.running:
            sequence = self.rng.choice(list(self.running))
            if self.world.chance(0.3):
                return self.free_tail(sequence, self.rng.randrange(len(self.tables[sequence])))
        if sequence is None:
            return None
        try:
            self.gpu_pool.free_sequence(sequence.number)
        except PinnedBlockError:
            assert self.has_pins(sequence)
            return "pinned"
        self.leave(sequence)
        return sequence.number

    def free_tail(self, sequence, first):
        try:
            self.gpu_pool.free(self.tables[sequence][first:], sequence.number)
        except PinnedBlockError:
            assert self.has_pins(sequence)
            return "pinned"
        del self.tables[sequence][first:]
        request = sequence.request
        request.num_computed_tokens = min(request.num_computed_tokens, first * BLOCK_SIZE)
        if not first:
            self.leave(sequence)
        return sequence.number

    def evict(self):
        return self.gpu_pool.evict(self.rng.randint(1, 3))

    def note_evicted(self, number, block_ids):
        (sequence,) = [one for one in self.tables if one.number == number]
        assert sorted(block_ids) == sorted(self.tables[sequence])
        assert sequence not in self.leaving
        self.leave(sequence)
        self.world.tally["evicted"] += 1

    def use(self):
        if self.running:
            self.gpu_pool.note_access(self.rng.choice(list(self.running)).number)

    def draw_priority(self):
        return self.rng.choice((0, 0, 1, 2))

    def take_events(self):
        return self.gpu_pool.take_events()

    # ---- queries on sequences --------------------------------------------------------------------

    def enter(self, where, sequence, num_computed):
        where[sequence] = None
        sequence.request.num_computed_tokens = num_computed
        self.tables[sequence] = self.gpu_pool.blocks_of(sequence.number)

    def leave(self, sequence):
        for where in (self.tables, self.running, self.loading, self.leaving):
            where.pop(sequence, None)

    def list_sequences(self):
        assert {one.number for one in self.tables} == set(self.gpu_pool.list_sequences())
        return list(self.tables)

    def ids_of(self, sequence):
        return self.tables[sequence]

    def list_written(self, sequence):
        """Return the range of tokens that is in the blocks of a sequence."""
        if sequence in self.loading:
            return 0, self.loading[sequence][1]
        return 0, sequence.request.num_computed_tokens

    def draw_table(self):
        if not self.running:
            return [], []
        sequence = self.rng.choice(list(self.running))
        ids = self.tables[sequence]
        filled = count_filled(len(ids), sequence.request.num_computed_tokens)
        return [self.pool.blocks[one] for one, some in zip(ids, filled, strict=True) if some], [
            some for some in filled if some
        ]

    # ---- pins ------------------------------------------------------------------------------------

    def pin(self):
        if self.running:
            block_id = self.rng.choice(self.tables[self.rng.choice(list(self.running))])
            try:
                self.gpu_pool.pin([block_id])
            except PinLimitError:
                return "refused"
            except FrozenSequenceError:
                assert any(block_id in self.tables[one] for one in self.leaving)
                return "frozen"
            self.pins[self.pool.blocks[block_id]] += 1
            return block_id
        return None

    def unpin(self):
        if self.pins:
            block = self.rng.choice(list(self.pins))
            self.gpu_pool.unpin([block.block_id])
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]

    def has_pins(self, sequence):
        return any(self.pool.blocks[block_id] in self.pins for block_id in self.tables[sequence])

    def list_pinned(self):
        return [block.block_id for block in self.pins]

    # ---- loads -----------------------------------------------------------------------------------

    def begin_load(self):
        """Allocate a sequence whose blocks a transfer writes by id."""
        if len(self.loading) > 2:
            return None
        sequence = self.world.make_sequence(self.world.draw_prompt())
        hashes = sequence.request.block_hashes
        ids = self.gpu_pool.claim_prefix(sequence.number, hashes[: len(hashes) // 2])
        self.enter(self.loading, sequence, 0)
        self.loading[sequence] = None, len(ids) * BLOCK_SIZE
        taken = self.take(sequence, sequence.request.num_tokens)
        if not taken:
            if sequence in self.loading and self.tables[sequence]:
                self.free(sequence)
            self.leave(sequence)
            return "refused"
        self.pool.flush_evicted()
        writer = self.begin_writing([self.pool.blocks[one] for one in taken], f"load {sequence.number}")
        writer.owed = [
            (self.tables[sequence][at // BLOCK_SIZE], at % BLOCK_SIZE, sequence.values[at])
            for at in range(len(ids) * BLOCK_SIZE, sequence.request.num_tokens)
        ]
        self.rng.shuffle(writer.owed)
        self.loading[sequence] = writer, len(ids) * BLOCK_SIZE
        self.world.tally["loads"] += 1
        return sequence.number

    def finish_writing(self, writer):
        super().finish_writing(writer)
        for sequence, (theirs, _) in list(self.loading.items()):
            if theirs is writer:
                del self.loading[sequence]
                self.running[sequence] = None
                sequence.request.num_computed_tokens = sequence.request.num_tokens
                self.cache_prefix(sequence)
                self.world.tally["loaded"] += 1
                return
        self.world.tally["written after an abort"] += 1

    def abort_loading(self):
        """Free a loading sequence; its transfer goes on writing."""
        if self.loading:
            return self.free(self.rng.choice(list(self.loading)))
        return None

    def open_tiers(self):
        super().open_tiers()
        self.cache.note_block_size(0, BLOCK_SIZE)

    # ---- changing ids ----------------------------------------------------------------------------

    def defragment(self, max_evictions=0, max_moves=None, goal=None):
        return self.gpu_pool.defragment(max_evictions, max_moves, goal)

    def grow_pool(self, count):
        self.gpu_pool.grow(count)

    def shrink_pool(self, count):
        self.gpu_pool.shrink(count)

    def note_moved(self, relocation):
        super().note_moved(relocation)
        remap = relocation.make_remap()
        for sequence, ids in self.tables.items():
            self.tables[sequence] = remap[np.array(ids, np.int64)].tolist()

    # ---- faults ----------------------------------------------------------------------------------

    def report(self):
        """Overwrite a free cached block, and forget its content."""
        blocks = [block for block in self.pool.blocks if block.block_hash is not None and not block.ref_cnt]
        if blocks:
            block = self.rng.choice(blocks)
            keys = self.pool.list_keys([block])
            self.corrupt(block)
            self.cache.forget(keys)
            self.pool.evict_blocks([block.block_id])

    def reset(self):
        is_idle = self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert self.pool.reset_prefix_cache() == is_idle
        self.world.tally["reset"] += is_idle

    def flush(self):
        self.cache.flush()

    # ---- migrations ------------------------------------------------------------------------------

    def draw_departure(self):
        there = [one for one in self.running if not self.has_pins(one)]
        return self.rng.choice(there) if there else None

    def list_copied(self):
        """Return the cached blocks that no sequence holds, for a migration by block ids."""
        return [
            one for one in self.pool.blocks if one.block_hash is not None and self.may_copy([one.block_id])
        ]

    def may_copy(self, block_ids):
        held = {block_id for ids in self.tables.values() for block_id in ids}
        return held.isdisjoint(block_ids)

    def run(self, scheduled):
        """Flush, as a step without tokens does: see `ManagerNode.run`."""
        self.cache.flush()

    def get_id(self, sequence):
        return sequence.number

    def has_sequence(self, sequence):
        return sequence.number in self.gpu_pool.list_sequences()

    def begin_leaving(self, sequence):
        del self.running[sequence]
        self.leaving[sequence] = None

    def take_back(self, sequence):
        del self.leaving[sequence]
        self.running[sequence] = None

    def forget_departed(self, sequence):
        self.leave(sequence)

    def on_arrived(self, sequence):
        self.enter(self.running, sequence, sequence.request.num_computed_tokens)

    def list_operations(self):
        return {
            **super().list_operations(),
            self.start: 6,
            self.grow: 8 if self.running else 0,
            self.fork: 3 if self.running else 0,
            self.free: 3 if self.running else 0,
            self.evict: 0.3,
            self.use: 0.5,
            self.pin: 1 if self.running else 0,
            self.unpin: 1 if self.pins else 0,
            self.begin_load: 2,
            self.abort_loading: 0.6 if self.loading else 0,
            self.report: 0.4,
            self.reset: 0.3,
            self.flush: 1,
        }

    def close(self):
        """End everything; the pool is idle afterwards."""
        while self.pins:
            self.unpin()
        for sequence in [*self.running, *self.loading]:
            self.free(sequence)
        self.close_common()
        self.cache.flush()
        self.restore_size()
