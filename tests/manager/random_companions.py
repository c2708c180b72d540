"""Companions of a `RandomScheduler`'s manager: swapped requests and kept blocks."""

import numpy as np

from kv_pool import AllocStatus, BlockPool
from kv_pool.errors import InvalidBlockError, PinLimitError
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.manager.retention.invariants import check_retention
from kv_pool.tiers.invariants import check_swapper
from kv_pool.tiers.swapper import BlockSwapper, SwapDirection


class RandomSwaps:
    """Swaps requests out and in; makes the copies some time later, when a plan is committed."""

    def __init__(self, scheduler, num_host_blocks):
        self.scheduler = scheduler
        setup = scheduler.setup
        host_pool = BlockPool(num_host_blocks + 1, setup.caching, setup.hash_block_size, medium="CPU")
        self.swapper = BlockSwapper(scheduler.manager, host_pool)
        self.slots = np.full((num_host_blocks + 1, scheduler.engine.slots.shape[1]), -1, dtype=np.int64)
        self.plans, self.swapped = {}, []

    def act(self):
        rng, scheduler = self.scheduler.rng, self.scheduler
        for sequence in [one for one in self.plans if rng.random() < 0.6]:
            self.close(sequence, rng.random() < 0.85)
        if scheduler.running and rng.random() < 0.12:
            self.swap_out(rng.choice(scheduler.running))
        for sequence in [one for one in self.swapped if rng.random() < 0.4]:
            if rng.random() < 0.1:
                self.swapped.remove(sequence)
                self.swapper.drop(sequence.request)
                scheduler.done["dropped on the host"] += 1
            else:
                self.swap_in(sequence)

    def swap_out(self, sequence):
        self.scheduler.apply_copies()
        status = self.swapper.can_swap_out(sequence.request)
        plan = self.swapper.swap_out(sequence.request)
        assert (plan is not None) == (status is AllocStatus.OK)
        if plan is not None:
            self.scheduler.running.remove(sequence)
            self.plans[sequence] = plan

    def swap_in(self, sequence):
        status = self.swapper.can_swap_in(sequence.request)
        plan = self.swapper.swap_in(sequence.request)
        assert (plan is not None) == (status is AllocStatus.OK)
        if plan is not None:
            self.swapped.remove(sequence)
            self.plans[sequence] = plan
        elif status is AllocStatus.NEVER:
            self.swapped.remove(sequence)
            self.swapper.drop(sequence.request)
            self.scheduler.done["too large"] += 1

    def close(self, sequence, is_done):
        plan = self.plans.pop(sequence)
        scheduler = self.scheduler
        if is_done:
            device = scheduler.engine.slots
            for source, target in plan.moves:
                if plan.direction is SwapDirection.OUT:
                    self.slots[target] = device[source]
                else:
                    device[target] = self.slots[source]
            try:
                plan.commit()
            except InvalidBlockError:  # blocks that the plan shares were reported since
                assert plan._is_invalid()
                is_done = False
        if is_done:
            scheduler.done[f"swapped {plan.direction.value}"] += 1
        else:
            plan.abort()
            scheduler.done["aborted plans"] += 1
        if (plan.direction is SwapDirection.OUT) == is_done:
            self.swapped.append(sequence)
        else:
            scheduler.running.append(sequence)

    def check(self):
        check_swapper(self.swapper)
        assert self.swapper.list_swapped_out() == [one.name for one in self.swapped]

    def drain(self):
        for sequence in list(self.plans):
            self.close(sequence, self.scheduler.rng.random() < 0.5)
        for sequence in self.swapped:
            self.swapper.drop(sequence.request)
        self.swapped = []
        check_swapper(self.swapper)
        assert self.swapper.host_pool.get_num_free_blocks() == self.swapper.host_pool.num_gpu_blocks - 1


class RandomRetention:
    """Sets directives, pins and sessions, with a clock that advances between steps."""

    def __init__(self, scheduler, max_pinned_blocks):
        self.scheduler = scheduler
        self.now = 0.0
        self.retention = BlockRetention(scheduler.pool, lambda: self.now, max_pinned_blocks, max_sessions=3)

    def act(self):
        rng, scheduler = self.scheduler.rng, self.scheduler
        self.now += rng.choice((0.0, 1.0, 3.0))
        here = [*scheduler.waiting, *scheduler.running]
        if here and rng.random() < 0.3:
            request = rng.choice(here).request
            directives = [self.draw() for _ in range(rng.randint(1, 2))]
            try:
                if rng.random() < 0.3:
                    self.retention.change_directives(request, directives)
                else:
                    self.retention.set_directives(request.request_id, directives)
                scheduler.done["directives"] += 1
            except PinLimitError:
                scheduler.done["refused pins"] += 1
        if here and rng.random() < 0.1:
            session_id = rng.choice("abcde")
            self.retention.keep_session(session_id, rng.choice(here).request, self.now + rng.choice((2, 20)))
            scheduler.done["sessions"] += 1
        if rng.random() < 0.05:
            self.retention.end_session(rng.choice("abcde"))

    def draw(self):
        rng = self.scheduler.rng
        start = rng.choice((0, 0, 5))
        return RetentionDirective(
            start,
            start + rng.choice((4, 10, 40)),
            priority=rng.choice((0, 20, 35, 60, 100)),
            duration_s=rng.choice((None, 2.0, 9.0)),
            pin=rng.random() < 0.15,
        )

    def check(self):
        check_retention(self.retention)
        self.scheduler.done["kept"] += bool(self.retention.num_retained)
        self.scheduler.done["pinned"] += bool(self.retention.num_pinned)

    def drain(self):
        for sequence in [*self.scheduler.waiting]:
            self.retention.forget_request(sequence.name)
        self.retention.release_all()
