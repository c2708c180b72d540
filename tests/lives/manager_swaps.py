"""`ManagerSwaps`: swaps to a host pool and back, and loads from tiers, in open plans."""

from lives.contents import BLOCK_SIZE, Side

from kv_pool import AllocStatus, BlockPool
from kv_pool.errors import InvalidBlockError
from kv_pool.tiers.swapper import BlockSwapper, SwapDirection

NUM_HOST_BLOCKS = 20


class OpenPlan:
    """A plan, its request, and the bytes that must not change: sources, hits, and targets copied so far."""

    def __init__(self, sequence, plan):
        self.sequence = sequence
        self.plan = plan
        self.promises = []
        self.hits = []
        self.to_copy = list(getattr(plan, "moves", ()))
        self.is_loaded = False
        self.is_void = False
        self.num_dropped = 0


class ManagerSwaps:
    """The swap operations of a `ManagerNode`."""

    def open_swaps(self):
        num_blocks = NUM_HOST_BLOCKS * len(self.groups)
        pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE, medium="CPU", enable_kv_cache_events=True)
        self.host = Side(pool, num_blocks + 1)
        self.swapper = BlockSwapper(self.manager, pool)
        self.swapped, self.planned, self.loading = [], {}, {}

    def take_events(self):
        return self.swapper.take_events()

    def list_pools(self):
        return [self.pool, self.host.pool]

    def reset_caches(self):
        return self.swapper.reset_prefix_cache()

    # ---- opening ---------------------------------------------------------------------------------

    def swap_out(self):
        if not self.running:
            return None
        sequence = self.rng.choice(self.running)
        self.run([])  # with all copies made
        status = self.swapper.can_swap_out(sequence.request)
        plan = self.swapper.swap_out(sequence.request)
        assert (plan is not None) == (status is AllocStatus.OK)
        if plan is None:
            return "refused"
        self.running.remove(sequence)
        self.open_swap(sequence, plan)
        return sequence.name

    def swap_in(self):
        if not self.swapped:
            return None
        sequence = self.rng.choice(self.swapped)
        status = self.swapper.can_swap_in(sequence.request)
        plan = self.swapper.swap_in(sequence.request)
        assert (plan is not None) == (status is AllocStatus.OK)
        if plan is None:
            return status.name
        self.swapped.remove(sequence)
        self.open_swap(sequence, plan)
        return sequence.name

    def open_swap(self, sequence, plan):
        opened = OpenPlan(sequence, plan)
        is_out = plan.direction is SwapDirection.OUT
        source = self.device if is_out else self.host
        sources = [source.pool.blocks[move.source] for move in plan.moves]
        opened.promises.append(self.expect(source, sources, "a source of an open plan"))
        on_device = plan.list_blocks(self.swapper.manager)
        opened.hits = [(block, block.block_hash) for block in on_device if block.block_hash is not None]
        found = [block for block, _ in opened.hits]
        opened.promises.append(self.expect(self.device, found, "in an open plan"))
        self.planned[sequence] = opened
        self.world.tally["opened", plan.direction.name] += 1

    def read_tiers(self):
        """Plan to start a waiting request with the blocks in the tiers after the prefix on the device."""
        if not self.waiting:
            return None
        sequence = self.rng.choice(self.waiting)
        prefix = self.manager.get_computed_blocks(sequence.request)
        hit = self.onboarder.find_prefix(sequence.request, prefix)
        if not hit.num_tokens:
            return "miss"
        plan = self.onboarder.plan_onboard(sequence.request, hit, prefix)
        if plan is None:
            return "refused"
        self.waiting.remove(sequence)
        opened = OpenPlan(sequence, plan)
        opened.num_dropped = self.cache.num_dropped
        opened.hits = [
            (block, block.block_hash) for block in plan.list_blocks() if block.block_hash is not None
        ]
        found = [block for block, _ in opened.hits]
        opened.promises.append(self.expect(self.device, found, "in an open plan"))
        self.planned[sequence] = opened
        self.world.tally["opened", "TIERS"] += 1
        return sequence.name

    # ---- while they are open ---------------------------------------------------------------------

    def copy_some(self):
        """Make some of an open plan's copies, or read its blocks from the tiers."""
        plans = [one for one in self.planned.values() if one.to_copy]
        if plans:
            opened = self.rng.choice(plans)
            self.copy_plan(opened, self.rng.randint(1, len(opened.to_copy)))
        plans = [one for one in self.planned.values() if self.is_onboard_plan(one) and not one.is_loaded]
        if plans and self.world.chance(0.5):
            self.load_plan(self.rng.choice(plans))

    def copy_plan(self, opened, count):
        moves, opened.to_copy = opened.to_copy[:count], opened.to_copy[count:]
        is_out = opened.plan.direction is SwapDirection.OUT
        source, target = (self.device, self.host) if is_out else (self.host, self.device)
        source.storage.copy_to(target.storage, moves)
        targets = [target.pool.blocks[move.target] for move in moves]
        opened.promises.append(self.expect(target, targets, "a target of an open plan"))

    def load_plan(self, opened):
        is_whole = opened.plan.load()
        opened.is_loaded = True
        if is_whole:
            read = opened.plan._targets
            opened.promises.append(self.expect(self.device, read, "read into by an open plan"))
        return is_whole

    def is_onboard_plan(self, opened):
        return not hasattr(opened.plan, "direction")

    # ---- closing ---------------------------------------------------------------------------------

    def close_plan(self):
        if not self.planned:
            return None
        opened = self.rng.choice(list(self.planned.values()))
        return self.end_plan(opened, self.world.chance(0.8))

    def end_plan(self, opened, is_done, close=lambda call, plan: call()):
        sequence, plan = opened.sequence, opened.plan
        del self.planned[sequence]
        way = "TIERS" if self.is_onboard_plan(opened) else plan.direction.name
        if is_done:
            if way == "TIERS":
                if not opened.is_loaded:
                    self.load_plan(opened)
            else:
                self.copy_plan(opened, len(opened.to_copy))
        self.end(*opened.promises)
        if is_done:
            is_void = way == "TIERS" and any(block.block_hash != key for block, key in opened.hits)
            is_void = is_void or (way == "TIERS" and not self.cache.has_all(plan.keys))
            try:
                close(plan.commit, plan)
                assert not is_void, f"{plan!r} was committed, and its content is void"
            except InvalidBlockError as error:
                if not (is_void or way == "TIERS" or "were reported as invalid" in str(error)):
                    raise
                is_done = False
        if not is_done:
            close(plan.abort, plan)
        self.world.tally["closed", way, is_done] += 1
        if way == "TIERS":
            if is_done:
                sequence.request.num_computed_tokens = plan.num_computed_tokens
            (self.running if is_done else self.waiting).append(sequence)
        else:
            (self.swapped if (way == "OUT") == is_done else self.running).append(sequence)
        return way, is_done

    def drop_swapped(self):
        if self.swapped:
            sequence = self.swapped.pop(self.rng.randrange(len(self.swapped)))
            self.swapper.drop(sequence.request)

    def close_swaps(self):
        for opened in list(self.planned.values()):
            self.end_plan(opened, self.world.chance(0.5))
        while self.swapped:
            self.drop_swapped()

    def list_swap_operations(self):
        return {
            self.swap_out: 3 if self.running else 0,
            self.swap_in: 4 if self.swapped else 0,
            self.read_tiers: 3 if self.waiting else 0,
            self.copy_some: 2 if self.planned else 0,
            self.close_plan: 4 if self.planned else 0,
            self.drop_swapped: 0.3 if self.swapped else 0,
        }
