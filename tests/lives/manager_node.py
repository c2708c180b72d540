"""`ManagerNode`: a scheduler over a `KVCacheManager`, with all companions of a manager."""

from lives.contents import BLOCK_SIZE, HASHER, MOST_TOKENS
from lives.manager_loads import ManagerLoads
from lives.manager_swaps import ManagerSwaps
from lives.node import Node, count_filled
from lives.router import check_router

from kv_pool import FullAttentionSpec, KVCacheManager, SlidingWindowSpec
from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.errors import InvalidArgumentError, PinLimitError
from kv_pool.manager.invariants import check_copies, check_writes
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.pool_site import PoolSite
from kv_pool.tiers.onboarder import TierOnboarder

GROUPS = {
    "full": (FullAttentionSpec(block_size=BLOCK_SIZE),),
    "window": (
        FullAttentionSpec(block_size=BLOCK_SIZE),
        SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=7),
    ),
}


class ManagerNode(ManagerLoads, ManagerSwaps, Node):
    """A sequence is in `waiting`, `running`, `loading`, `swapped`, `planned` or `leaving`."""

    def __init__(self, world, name, shape, folder):
        groups = GROUPS[shape]
        super().__init__(world, name, 18 * len(groups), folder)
        pool = RunBlockPool(
            self.num_blocks + 1,
            True,
            BLOCK_SIZE,
            enable_kv_cache_events=True,
            dense_events=world.chance(0.5),
        )
        self.retention = BlockRetention(pool, world.read_clock, self.num_blocks // 5, max_sessions=3)
        watermark = world.rng.choice((0.0, 0.05))
        self.manager = KVCacheManager(
            pool,
            groups=groups,
            max_model_len=MOST_TOKENS + 4,
            watermark=watermark,
            retention=self.retention,
        )
        device = self.make_device(pool)
        site = PoolSite(ManagerSequences(self.manager, device.storage), hasher=HASHER, clock=world.read_clock)
        self.open(pool, site, device)
        self.groups = [spec.make_group(pool, group_id) for group_id, spec in enumerate(groups)]
        self.open_tiers()
        self.open_swaps()
        self.waiting, self.running, self.leaving = [], [], []
        self.pinned_keys = []

    # ---- a step of the engine --------------------------------------------------------------------

    def arrive(self):
        if len(self.waiting) < 4:
            sequence = self.world.make_sequence(self.world.draw_prompt())
            if self.world.chance(0.3):
                self.retention.set_directives(sequence.name, [self.draw_directive(False)])
            self.waiting.append(sequence)

    def admit(self):
        """Start a waiting request with the prefix on device and tiers, and compute some of the rest."""
        if not self.waiting:
            return
        sequence = self.rng.choice(self.waiting)
        request = sequence.request
        num_new = self.rng.choice((None, 1, 5))
        found = self.onboarder.admit(request, num_new, delay_cache_blocks=self.world.chance(0.3))
        if found is None:
            self.world.tally["refused"] += 1
            return
        self.world.tally["hit"] += bool(found["GPU"])
        self.world.tally["from tiers"] += sum(found.values()) > found["GPU"]
        self.waiting.remove(sequence)
        self.running.append(sequence)
        num_left = sequence.num_left
        self.run([(sequence, num_left if num_new is None else min(num_new, num_left), 0)])

    def step(self):
        """Allocate for some running requests, preempt others if blocks are missing, and compute."""
        scheduled = []
        for sequence in self.rng.sample(self.running, min(4, len(self.running))):
            if sequence not in self.running:
                continue
            if not sequence.num_left:
                sequence.append(self.world.draw_tokens(self.rng.randint(1, 3)))
            num_new = self.rng.randint(1, sequence.num_left)
            num_guessed = self.rng.choice((0, 0, 3))
            options = {"num_lookahead_tokens": num_guessed, "delay_cache_blocks": self.world.chance(0.3)}
            while self.manager.allocate_slots(sequence.request, num_new, **options) is None:
                victims = [one for one in self.running if one not in [taken for taken, *_ in scheduled]]
                victim = self.rng.choice(victims)
                self.preempt(victim)
                if victim is sequence:
                    break
            else:
                scheduled.append((sequence, num_new, num_guessed))
        self.run(scheduled)
        for sequence in list(self.running):
            if sequence.request.num_tokens >= MOST_TOKENS and not sequence.num_left:
                self.finish(sequence)

    def run(self, scheduled):
        """Run a step: flush the tiers, make the manager's block copies, and write each scheduled token."""
        counts = {sequence.name: num_new for sequence, num_new, _ in scheduled}
        here = [*self.running, *self.loading]
        check_writes(self.manager, [(one.request, counts.get(one.name, 0)) for one in here])
        check_copies(self.manager)
        self.cache.flush()
        moves = self.manager.take_block_copies()
        self.world.tally["copied on write"] += len(moves)
        self.device.storage.apply_moves(moves)
        for sequence, num_new, num_guessed in scheduled:
            start = sequence.request.num_computed_tokens
            for group_id, block_ids in enumerate(self.list_tables(sequence)):
                self.device.write(block_ids, sequence, start, start + num_new, group_id)
                for position in range(start + num_new, start + num_new + num_guessed):
                    if position // BLOCK_SIZE < len(block_ids):
                        block_id = block_ids[position // BLOCK_SIZE]
                        assert self.pool.blocks[block_id].block_hash is None
                        self.device.kv[block_id, position % BLOCK_SIZE] = self.rng.getrandbits(63)
        for sequence, num_new, _ in scheduled:
            sequence.request.num_computed_tokens += num_new

    def cache_late(self):
        if self.running:
            request = self.rng.choice(self.running).request
            self.manager.cache_blocks(request, request.num_computed_tokens)

    def flush(self):
        self.cache.flush()

    def fork(self):
        if not self.running or len(self.running) > 6:
            return
        parent = self.rng.choice(self.running)
        num_computed = parent.request.num_computed_tokens
        if not 0 < num_computed < MOST_TOKENS - 4:
            return
        tokens = parent.request.all_token_ids[:num_computed]
        child = self.world.make_sequence([*tokens, *self.world.draw_tokens(self.rng.randint(1, 3))])
        child.request.num_computed_tokens = num_computed
        self.manager.fork(parent.request, child.request)
        self.running.append(child)
        self.world.tally["forked"] += 1

    # ---- ends ------------------------------------------------------------------------------------

    def finish(self, sequence=None):
        """Free a running request: it has ended, or is aborted."""
        if sequence is None and self.running:
            sequence = self.rng.choice(self.running)
        if sequence is not None:
            self.manager.free(sequence.request)
            self.running.remove(sequence)

    def abort_before_step(self):
        """Allocate slots for a step that does not happen; the request may be aborted or preempted then."""
        if self.running:
            sequence = self.rng.choice(self.running)
            if not sequence.num_left:
                sequence.append(self.world.draw_tokens(2))
            given = self.manager.allocate_slots(sequence.request, sequence.num_left, delay_cache_blocks=True)
            if self.world.chance(0.5):
                self.finish(sequence)
            elif self.world.chance(0.5):
                self.preempt(sequence)
            return None if given is None else "given"
        return None

    def preempt(self, sequence=None):
        if sequence is None and self.running:
            sequence = self.rng.choice(self.running)
        if sequence is not None:
            self.manager.free(sequence.request)
            sequence.request.num_computed_tokens = 0
            self.running.remove(sequence)
            self.waiting.append(sequence)

    def refuse_leaving(self):
        """Check that freeing a migrating request is refused."""
        for sequence in self.leaving:
            try:
                self.manager.free(sequence.request)
            except InvalidArgumentError:
                continue
            raise AssertionError(f"{sequence.name} was freed while it was being moved")

    def report(self):
        """Overwrite a block that only running requests, readers and watchers hold, and report it invalid."""
        num_known = {}
        for sequence in self.running:
            for block_ids in self.list_tables(sequence):
                for block_id in block_ids:
                    num_known[block_id] = num_known.get(block_id, 0) + 1
        for one in self.readers:
            for block in one.blocks:
                num_known[block.block_id] = num_known.get(block.block_id, 0) + 1
        for block in self.touched:
            num_known[block.block_id] = num_known.get(block.block_id, 0) + 1
        pending = {*self.manager.copies._source_of, *self.manager.copies._source_of.values()}
        blocks = [
            block
            for block in self.pool.blocks[1:]
            if block.ref_cnt == num_known.get(block.block_id, 0)
            and (block.ref_cnt or block.block_hash is not None)
            and block not in pending
        ]
        if not blocks:
            return None
        leased = self.source_role.list_copied()
        block = self.rng.choice([one for one in blocks if one in leased] or blocks)
        block_id = block.block_id
        self.corrupt(block)
        self.note_evicting()
        report = self.manager.report_invalid_blocks([block_id])
        self.forget_content(report.evicted_blocks)
        for sequence in [*self.running, *self.loading]:
            num_valid = report.num_valid_tokens.get(sequence.name)
            if num_valid is None:
                continue
            if sequence in self.loading:
                self.abort_loading(sequence)
            elif num_valid == 0:
                self.preempt(sequence)
            else:
                request = sequence.request
                request.num_computed_tokens = min(request.num_computed_tokens, num_valid)
        return block_id

    def evict(self):
        block_ids = self.rng.sample(range(1, len(self.pool.blocks)), 2)
        self.note_evicting()
        self.manager.evict_blocks(block_ids)
        return block_ids

    def note_evicting(self):
        """Expect that pinned content is evicted, and that tiers forget the content of open plans."""
        self.pinned_keys = []
        for opened in self.planned.values():
            opened.is_void = True

    def reset(self):
        num_free = self.manager.get_num_free_blocks() + self.retention.num_pinned
        is_idle = num_free == self.pool.num_gpu_blocks - 1
        is_empty_on_host = not len(self.host.pool.cached_block_hash_to_block)
        is_idle_on_host = self.host.pool.get_num_free_blocks() == self.host.pool.num_gpu_blocks - 1
        if is_empty_on_host and self.world.chance(0.5):
            check_router(self)  # later events of the host would be taken before this reset
            is_idle = is_idle and not (self.swapper.list_swapped_out() or self.swapper.list_open_plans())
            assert self.manager.reset_prefix_cache() == is_idle
        else:
            is_idle = is_idle and is_idle_on_host
            assert self.swapper.reset_prefix_cache() == is_idle
        self.world.tally["reset"] += is_idle
        return is_idle

    # ---- retention -------------------------------------------------------------------------------

    def keep(self):
        """Set or change directives of a request, or start or end a session."""
        here = [*self.waiting, *self.running]
        if not here:
            return "nothing"
        request = self.rng.choice(here).request
        way = self.rng.choice(("set", "change", "session", "end"))
        try:
            if way == "set":
                self.retention.set_directives(request.request_id, [self.draw_directive()])
            elif way == "change":
                self.retention.change_directives(request, [self.draw_directive(), self.draw_directive()])
            elif way == "session":
                until = self.world.now + self.rng.choice((2.0, 20.0))
                self.retention.keep_session(self.rng.choice("abcde"), request, until)
            else:
                self.retention.end_session(self.rng.choice("abcde"))
        except PinLimitError:
            way += ", refused"
        self.world.tally[way] += 1
        return way

    def draw_directive(self, may_pin=True):
        start = self.rng.choice((0, 0, 5))
        return RetentionDirective(
            start,
            start + self.rng.choice((4, 10, 40)),
            priority=self.rng.choice((0, 20, 35, 60, 100)),
            duration_s=self.rng.choice((None, 2.0, 9.0)),
            pin=may_pin and self.world.chance(0.2),
        )

    def open_tiers(self):
        super().open_tiers()
        self.onboarder = TierOnboarder(self.manager, self.cache)

    # ---- for moves, leases and migrations --------------------------------------------------------

    def defragment(self, max_evictions=0, max_moves=None, goal=None):
        copy = self.device.storage.apply_moves
        limits = {"max_evictions": max_evictions, "max_moves": max_moves, "on_moved": self.note_moved}
        if goal is not None:
            relocation = compaction.gather(self.pool, copy, run_length=4, goal=goal, **limits)
            return len(relocation.moves)
        return sum(len(one.moves) for one in compaction.pack(self.pool, copy, **limits))

    def list_tables(self, sequence):
        return [self.manager.get_block_ids(sequence.name, group_id) for group_id in range(len(self.groups))]

    def list_contents(self, sequence):
        """Return `list_tables` with each target of a pending copy replaced by its source."""
        find_source = self.manager.copies.find_source
        return [
            [find_source(self.pool.blocks[block_id]).block_id for block_id in block_ids]
            for block_ids in self.list_tables(sequence)
        ]

    def draw_table(self):
        """Return the blocks of a running request, and how many slots of each are computed."""
        if not self.running:
            return [], []
        sequence = self.rng.choice(self.running)
        blocks, slots = [], []
        for group_id, block_ids in enumerate(self.list_contents(sequence)):
            filled = count_filled(len(block_ids), sequence.request.num_computed_tokens)
            first = self.groups[group_id].count_skipped_tokens(sequence.request.num_computed_tokens)
            for position, block_id in enumerate(block_ids):
                if block_id and filled[position] and position >= first // BLOCK_SIZE:
                    blocks.append(self.pool.blocks[block_id])
                    slots.append(filled[position])
        return blocks, slots

    def draw_departure(self):
        return self.rng.choice(self.running) if self.running else None

    def list_copied(self):
        """Return the cached blocks, for a migration by block ids."""
        return [block for block in self.pool.blocks if block.block_hash is not None]

    def begin_leaving(self, sequence):
        self.running.remove(sequence)
        self.leaving.append(sequence)

    def take_back(self, sequence):
        self.leaving.remove(sequence)
        self.running.append(sequence)

    def list_operations(self):
        return {
            **super().list_operations(),
            self.arrive: 5 if len(self.waiting) < 4 else 0,
            self.admit: 5 if self.waiting else 0,
            self.step: 12 if self.running else 0,
            self.fork: 3 if self.running else 0,
            self.cache_late: 1 if self.running else 0,
            self.flush: 0.5,
            self.finish: 1.5 if self.running else 0,
            self.preempt: 0.5 if self.running else 0,
            self.abort_before_step: 0.5 if self.running else 0,
            self.refuse_leaving: 0.3 if self.leaving else 0,
            self.report: 4 if self.source_role.list_copied() else 0.7,
            self.evict: 0.5,
            self.reset: 0.3,
            self.keep: 3,
            **self.list_load_operations(),
            **self.list_swap_operations(),
        }

    def close(self):
        """End everything; the pool is idle afterwards."""
        self.close_swaps()
        for sequence in list(self.loading):
            self.abort_loading(sequence)
        self.run([])
        for sequence in list(self.running):
            self.finish(sequence)
        for sequence in self.waiting:
            self.retention.forget_request(sequence.name)
        self.waiting = []
        self.close_common()
        self.retention.release_all()
        self.cache.flush()
        self.restore_size()
