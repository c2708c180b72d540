"""`FailingLife`: short random lives over real bytes, in which loads fail and are reported later.

What a request computes depends on what it reads: from wrong bytes it computes wrong ones. After the reports,
all cached blocks in all tiers have bytes computed from their tokens, and so have all requests not named.
"""

import random
from collections import Counter

import numpy as np
from tiers.swap_engine import HASH_BLOCK_SIZE, HASHER, values_of
from tiers.tier_engine import TierEngine

from kv_pool import (
    BlockPool,
    BlockSwapper,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheManager,
    MambaSpec,
    PrefixRules,
    Request,
    SlidingWindowSpec,
)
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.errors import InvalidBlockError
from kv_pool.manager.invariants import check_copies
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers import invariants as tier_invariants
from kv_pool.tiers.invariants import check_swapper

WRONG = 2**62
NUM_STEPS = 80
STATE_RULES = PrefixRules(retention_interval=0)
KINDS = {
    "full": ([FullAttentionSpec(block_size=4)], None),
    "large": ([FullAttentionSpec(block_size=8)], None),
    "window": ([SlidingWindowSpec(block_size=4, sliding_window=8)], None),
    "full and window": (
        [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=7)],
        None,
    ),
    "sizes": ([FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=6)], None),
    "chunks": (
        [FullAttentionSpec(block_size=4), ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8)],
        None,
    ),
    "mamba": ([FullAttentionSpec(block_size=4), MambaSpec(block_size=4)], None),
    "states": ([FullAttentionSpec(block_size=4), MambaSpec(block_size=8)], STATE_RULES),
    "checkpoints": (
        [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)],
        STATE_RULES,
    ),
}


class ByteEngine(TierEngine):
    """A `TierEngine` with a host pool for swaps, whose steps read before they write.

    Attributes:
        promised: for each hash of a prefix, the values of its tokens.
        has_tiers: whether the pool has lower tiers.
    """

    def __init__(self, folder, num_blocks, num_host, groups, rules, *, has_tiers, **options):
        super().__init__(folder, num_blocks, groups=groups, **options)
        if rules is not None:
            self.manager = KVCacheManager(self.pool, groups=groups, prefix_rules=rules)
        if rules is not None or not has_tiers:
            self.cache.close()
        self.has_tiers = rules is None and has_tiers
        self.can_swap = rules is None
        self.host_pool = BlockPool(num_host + 1, True, HASH_BLOCK_SIZE, medium="CPU")
        self.swapper = BlockSwapper(self.manager, self.host_pool)
        self.host_kv = np.zeros((num_host + 1, self.kv.shape[1]), np.uint64)
        self.host = BlockStorage.wrap_state([self.host_kv])

    def run(self):
        """Run a step, as `TierEngine.run`; the values of requests that read wrong bytes are wrong."""
        if self.has_tiers:
            self.cache.flush()
        check_copies(self.manager)
        self.device.apply_moves(self.manager.take_block_copies())
        scheduled, self.scheduled = self.scheduled, []
        is_good = [self.reads_good(request, request.num_computed_tokens) for request, _ in scheduled]
        for (request, end), good in zip(scheduled, is_good, strict=True):
            self.write(request, request.num_computed_tokens, end, good)
            request.num_computed_tokens = end

    def write(self, request, start, end, is_good=True):
        values = values_of(request)
        for group_id, spec in enumerate(self.manager.groups):
            blocks = self.manager.get_table(request.request_id, group_id).blocks
            positions = (
                range(start, end)
                if not isinstance(spec, MambaSpec)
                else range(end - 1, end)
                if end > start
                else ()
            )
            for position in positions:
                block = blocks[position // spec.block_size]
                if block.is_null:
                    continue
                slot = 0 if isinstance(spec, MambaSpec) else position % spec.block_size
                self.kv[block.block_id, slot] = values[position] + group_id if is_good else WRONG + position

    def list_reads(self, request, num_tokens, tables=None):
        """Yield the slots that the next token after `num_tokens` reads: block, slot, expected value."""
        values = values_of(request)
        for group, spec in zip(self.groups, self.manager.groups, strict=True):
            group_id = group.group_id
            table = (
                self.manager.get_table(request.request_id, group_id) if tables is None else tables[group_id]
            )
            first = group.count_skipped_tokens(num_tokens)
            if isinstance(spec, MambaSpec):
                first = max(0, num_tokens - 1)
            for position in range(first, num_tokens):
                slot = 0 if isinstance(spec, MambaSpec) else position % spec.block_size
                yield table.blocks[position // spec.block_size], slot, values[position] + group_id

    def reads_good(self, request, num_tokens, tables=None):
        kv = self.kv if tables is None else self.host_kv
        return all(
            not block.is_null and int(kv[block.block_id, slot]) == value
            for block, slot, value in self.list_reads(request, num_tokens, tables)
        )

    def promise(self, request):
        values = values_of(request)
        for index, block_hash in enumerate(request.block_hashes):
            self.promised[block_hash] = values[: (index + 1) * HASH_BLOCK_SIZE]

    def find_wrong_keys(self):
        """Return the cached keys, on the device, in the host pool and in tiers, with wrong bytes."""
        wrong = []
        for pool, kv in ((self.pool, self.kv), (self.host_pool, self.host_kv)):
            for block in pool.blocks:
                for key in pool.list_keys([block]):
                    if not self.is_promised(key, kv[block.block_id]):
                        wrong.append((pool.medium, block.block_id, len(self.promised[get_block_hash(key)])))
        for tier in self.cache.tiers if self.has_tiers else ():
            keys = tier.list_keys()
            read = tier.read(keys)
            content = np.zeros((len(keys) + 1, self.kv.shape[1]), np.uint64)
            moves = list(zip(read.block_ids, range(len(keys)), strict=True))
            read.storage.copy_to(BlockStorage.wrap_state([content]), moves)
            wrong += [
                (tier.medium, len(self.promised[get_block_hash(key)]))
                for key, row in zip(keys, content, strict=False)
                if not self.is_promised(key, row)
            ]
        if self.has_tiers:
            for key, block in self.cache._pending.items():
                if not self.is_promised(key, self.kv[block.block_id]):
                    wrong.append(("pending", block.block_id))
        return wrong

    def is_promised(self, key, row):
        values = self.promised[get_block_hash(key)]
        group_id = get_group_id(key)
        spec = self.manager.groups[group_id]
        if isinstance(spec, MambaSpec):
            return int(row[0]) == values[-1] + group_id
        start = (len(values) - 1) // spec.block_size * spec.block_size
        return row[: len(values) - start].tolist() == [value + group_id for value in values[start:]]


class FailingLife:
    """One life.

    Attributes:
        bad: blocks with a failed load that is not reported yet, each with a hold or None, and a generation.
        is_lost: such a block was reused before its report, so that the life ends.
    """

    def __init__(self, seed, folder, kind=None):
        self.rng = random.Random(seed)
        drawn = self.rng.choice(list(KINDS))
        self.kind = kind or drawn
        groups, rules = KINDS[self.kind]
        num = len(groups)
        self.engine = ByteEngine(
            folder,
            self.rng.randint(9, 14) * num,
            self.rng.randint(6, 20) * num,
            groups,
            rules,
            has_tiers=self.rng.random() < 0.7,
            num_host_blocks=self.rng.randint(3, 30) * num,
            num_disk_blocks=self.rng.choice((0, 0, 10 * num)),
            write=self.rng.choice(("back", "through")),
            max_prefetch_blocks=0,
        )
        self.manager = self.engine.manager
        self.prompts = [self.draw_tokens(self.rng.randint(8, 34)) for _ in range(4)]
        self.waiting, self.running, self.swapped, self.bad = [], [], [], {}
        self.loading, self.named = {}, {}
        self.plans = []
        self.is_lost = False
        self.tally = Counter()
        self.num_made = 0
        self.log = []

    def run(self, num_steps=NUM_STEPS):
        for _ in range(num_steps):
            self.step()
            if self.is_lost:
                return self
        self.report()
        self.check()
        return self

    def step(self):
        rng = self.rng
        actions = {
            self.arrive: 6,
            self.admit: 8,
            self.load: 3,
            self.finish_loading: 2,
            self.grow: 6,
            self.fork: 2,
            self.end: 4,
            self.preempt: 1.5,
            self.fail_step: 0.5,
            self.swap_out: 1.5,
            self.swap_in: 2,
            self.close_plan: 2,
            self.onboard: 2.5,
            self.report: 1.5,
            self.evict: 0.7 if self.bad else 0,
            self.reset: 0.2,
        }
        (action,) = rng.choices(list(actions), list(actions.values()))
        # A bad block that may be reused before its report must be reported first.
        if any(block.ref_cnt == 0 for block in self.bad):
            self.report()
        self.log.append(action.__name__)
        action()
        self.engine.run()
        if any(block.generation != generation for block, (_, generation) in self.bad.items()):
            self.is_lost = True  # after its reuse a block's id names other content
            self.tally["lost"] += 1
            return
        self.check()

    # ---- requests ----------------------------------------------------------------------------------

    def draw_tokens(self, count):
        return [self.rng.randrange(4) for _ in range(count)]

    def make_request(self, tokens):
        self.num_made += 1
        request = Request(f"r{self.num_made}", tokens, HASHER)
        self.engine.promise(request)
        return request

    def arrive(self):
        if len(self.waiting) < 5:
            prompt = self.rng.choice(self.prompts)
            tokens = prompt[: self.rng.randint(1, len(prompt))] + self.draw_tokens(self.rng.randint(1, 4))
            self.waiting.append(self.make_request(tokens))

    def admit(self):
        if not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        num_new = self.rng.choice((None, None, 1, 5))
        if self.engine.has_tiers:
            found = self.engine.onboarder.admit(request, num_new, delay_cache_blocks=self.rng.random() < 0.2)
            if found is None:
                return
            num_hit = sum(found.values())
            self.tally["hit in tiers"] += num_hit > found["GPU"]
        else:
            prefix = self.manager.get_computed_blocks(request)
            num_left = request.num_tokens - prefix.num_tokens
            delays = self.rng.random() < 0.2
            if (
                self.manager.allocate_slots(
                    request,
                    num_left if num_new is None else min(num_new, num_left),
                    prefix,
                    delay_cache_blocks=delays,
                )
                is None
            ):
                return
            num_hit = request.num_computed_tokens = prefix.num_tokens
        self.tally["hit"] += num_hit > 0
        self.waiting.remove(request)
        self.running.append(request)
        num_left = request.num_tokens - num_hit
        self.engine.schedule(request, num_left if num_new is None else min(num_new, num_left))

    def load(self):
        """Start a request with external tokens, some of whose blocks fail to load."""
        if not self.waiting:
            return
        rng, manager = self.rng, self.manager
        request = rng.choice(self.waiting)
        prefix = manager.get_computed_blocks(request)
        num_left = request.num_tokens - prefix.num_tokens
        if num_left < 2:
            return
        num_external = rng.randint(1, num_left - 1)
        if any(isinstance(spec, MambaSpec) for spec in manager.groups):
            num_external -= (prefix.num_tokens + num_external) % 8
            if num_external < 1:
                return
        is_async = rng.random() < 0.4
        num_new = 0 if is_async else rng.randint(1, num_left - num_external)
        if (
            manager.allocate_slots(
                request,
                num_new,
                prefix,
                num_external_computed_tokens=num_external,
                delay_cache_blocks=is_async,
            )
            is None
        ):
            return
        self.waiting.remove(request)
        request.num_computed_tokens = end = prefix.num_tokens + num_external
        self.engine.device.apply_moves(manager.take_block_copies()) if not self.engine.scheduled else None
        if self.engine.has_tiers:
            self.engine.cache.flush_evicted()
        # A load writes the blocks of attention, and the state after its last token.
        self.engine.write(request, prefix.num_tokens, end)
        if rng.random() < 0.6:
            self.fail(request, prefix.num_tokens, end)
        self.tally["loads"] += 1
        if is_async:
            self.loading[request] = True
        else:
            self.running.append(request)
            self.engine.schedule(request, num_new)

    def fail(self, request, start, end):
        rng, engine = self.rng, self.engine
        for _ in range(rng.randint(1, 2)):
            group_id = rng.randrange(len(engine.groups))
            spec = self.manager.groups[group_id]
            blocks = self.manager.get_table(request.request_id, group_id).blocks
            first = (
                start // spec.block_size if not isinstance(spec, MambaSpec) else (end - 1) // spec.block_size
            )
            loaded = [block for block in blocks[first : -(-end // spec.block_size)] if not block.is_null]
            if start % spec.block_size and loaded and loaded[0] is blocks[start // spec.block_size]:
                del loaded[0]
            if not loaded:
                continue
            block = rng.choice(loaded)
            if block.ref_cnt > 1 or block in self.bad:
                continue
            engine.kv[block.block_id] = WRONG + 77
            hold = engine.pool.hold([block], "a failing load") if rng.random() < 0.4 else None
            self.bad[block] = hold, block.generation
            self.tally["failed"] += 1

    def finish_loading(self):
        if self.loading:
            request = self.rng.choice(list(self.loading))
            del self.loading[request]
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self.running.append(request)

    def grow(self):
        for request in self.rng.sample(self.running, min(3, len(self.running))):
            if request.num_computed_tokens == request.num_tokens and request.num_tokens < 44:
                request.append_output_token_ids(self.draw_tokens(self.rng.randint(1, 5)))
                self.engine.promise(request)
            num_left = request.num_tokens - request.num_computed_tokens
            if num_left and self.engine.grow(
                request, self.rng.randint(1, num_left), delay_cache_blocks=self.rng.random() < 0.15
            ):
                self.tally["grown"] += 1

    def fork(self):
        if not self.running or len(self.running) > 6:
            return
        parent = self.rng.choice(self.running)
        num_computed = parent.num_computed_tokens
        if 0 < num_computed < 40:
            child = self.make_request([*parent.all_token_ids[:num_computed], *self.draw_tokens(2)])
            if self.rng.random() < 0.5:
                child = self.make_request([*parent.all_token_ids, *self.draw_tokens(1)])
            child.num_computed_tokens = num_computed
            self.manager.fork(parent, child)
            self.running.append(child)
            self.tally["forks"] += 1

    def end(self):
        if self.running:
            self.manager.free(self.running.pop(self.rng.randrange(len(self.running))))
        elif self.loading:
            request, _ = self.loading.popitem()
            self.manager.free(request)

    def preempt(self, request=None):
        if request is None and self.running:
            request = self.rng.choice(self.running)
        if request is not None:
            self.manager.free(request)
            self.restart(request)

    def restart(self, request):
        request.num_computed_tokens = 0
        for place in (self.running, self.swapped):
            if request in place:
                place.remove(request)
        self.loading.pop(request, None)
        self.waiting.append(request)

    def fail_step(self):
        """Allocate for a step that does not run: report what its requests would have written."""
        self.admit()
        self.admit()
        self.grow()
        scheduled, self.engine.scheduled = self.engine.scheduled, []
        if self.engine.has_tiers:
            self.engine.cache.flush()
        self.engine.device.apply_moves(self.manager.take_block_copies())
        unwritten = []
        for request, _ in scheduled:
            for group_id, spec in enumerate(self.manager.groups):
                table = self.manager.get_table(request.request_id, group_id)
                unwritten += table.blocks[request.num_computed_tokens // spec.block_size :]
        self.note_report(
            self.manager.report_invalid_blocks({one.block_id for one in unwritten if not one.is_null})
        )
        self.tally["failed steps"] += bool(unwritten)

    # ---- swaps and tiers ---------------------------------------------------------------------------

    def swap_out(self):
        if not self.running or not self.engine.can_swap:
            return
        request = self.rng.choice(self.running)
        self.open_plan(request, self.engine.swapper.swap_out(request), self.running)

    def swap_in(self):
        if self.swapped:
            request = self.rng.choice(self.swapped)
            self.open_plan(request, self.engine.swapper.swap_in(request), self.swapped)

    def open_plan(self, request, plan, requests):
        if plan is not None:
            requests.remove(request)
            self.plans.append((request, plan))
            if self.rng.random() < 0.6:
                self.close_plan()

    def onboard(self):
        for request in self.waiting if self.engine.has_tiers else ():
            prefix = self.manager.get_computed_blocks(request)
            hit = self.engine.onboarder.find_prefix(request, prefix)
            if hit.num_tokens:
                plan = self.engine.onboarder.plan_onboard(request, hit, prefix)
                if plan is not None:
                    self.waiting.remove(request)
                    self.plans.append((request, plan))
                    plan.load()
                return

    def close_plan(self):
        """Commit or abort a plan; the copies of a swap are made now."""
        if not self.plans:
            return
        request, plan = self.plans.pop()
        is_swap = hasattr(plan, "direction")
        way = plan.direction.value if is_swap else "tiers"
        is_done = self.rng.random() < 0.8
        if is_done and is_swap:
            source, target = self.engine.device, self.engine.host
            if way == "in":
                source, target = target, source
            source.copy_to(target, plan.moves)
        if is_done:
            try:
                plan.commit()
            except InvalidBlockError:
                is_done = False
                self.tally["void plans", way] += 1
        if not is_done:
            plan.abort()
        self.tally["closed", way, is_done] += 1
        if way == "tiers":
            if is_done:
                request.num_computed_tokens = plan.num_computed_tokens
            (self.running if is_done else self.waiting).append(request)
        else:
            (self.swapped if (way == "out") == is_done else self.running).append(request)
            num_valid = self.named.get(request)
            if num_valid is not None:
                self.continue_from(request, num_valid)

    # ---- reports -----------------------------------------------------------------------------------

    def report(self):
        """Report all failed loads, in one report or several."""
        if not self.bad:
            return
        ids = [block.block_id for block in self.bad]
        for hold, _ in self.bad.values():
            if hold is not None:
                hold.release()
        self.bad = {}
        self.tally["reports"] += 1
        if self.rng.random() < 0.3 and len(ids) > 1:
            self.note_report(self.manager.report_invalid_blocks(ids[:1]))
            ids = ids[1:]
        self.note_report(self.manager.report_invalid_blocks(ids))

    def note_report(self, report):
        by_name = {
            request.request_id: request
            for request in [*self.running, *self.swapped, *self.loading, *(one for one, _ in self.plans)]
        }
        for name, num_valid in report.num_valid_tokens.items():
            request = by_name[name]
            self.tally["named"] += 1
            self.tally["named, swapped"] += request in self.swapped
            if any(request is one for one, _ in self.plans):
                self.named[request] = min(num_valid, self.named.get(request, num_valid))
                self.tally["named, in a plan"] += 1
            else:
                self.continue_from(request, num_valid)

    def continue_from(self, request, num_valid):
        """Continue a named request from its valid tokens."""
        self.named.pop(request, None)
        if num_valid and request not in self.loading:
            request.num_computed_tokens = min(request.num_computed_tokens, num_valid)
            self.tally["continued"] += 1
        elif request in self.swapped:
            self.engine.swapper.drop(request)
            self.restart(request)
        else:
            self.preempt(request)

    def evict(self):
        """Evict failed loads, and end all requests."""
        if not self.bad:
            return
        self.manager.evict_blocks([block.block_id for block in self.bad])
        for hold, _ in self.bad.values():
            if hold is not None:
                hold.release()
        self.bad = {}
        self.named = {}
        while self.plans:
            request, plan = self.plans.pop()
            plan.abort()
            place = self.waiting
            if hasattr(plan, "direction"):
                place = self.running if plan.direction.value == "out" else self.swapped
            place.append(request)
        for request in [*self.running, *self.loading]:
            self.preempt(request)
        for request in list(self.swapped):
            self.engine.swapper.drop(request)
            self.restart(request)
        self.tally["evicted"] += 1

    def reset(self):
        is_idle = not (
            self.running
            or self.swapped
            or self.loading
            or self.plans
            or any(hold for hold, _ in self.bad.values())
        )
        is_done = self.manager.reset_prefix_cache()
        assert is_done == is_idle, (is_done, is_idle)
        if is_done:
            self.bad = {}
            self.engine.promised = dict(self.engine.promised)
            assert not len(self.engine.host_pool.cached_block_hash_to_block)
            self.tally["reset"] += 1

    # ---- checks ------------------------------------------------------------------------------------

    def check(self):
        """Check that, if all failed loads are reported, everything that may be hit or read is good."""
        check_swapper(self.engine.swapper)
        if self.engine.has_tiers:
            tier_invariants.check(self.engine.onboarder)
        if self.bad:
            return
        wrong = self.engine.find_wrong_keys()
        assert not wrong, f"cached with wrong bytes: {wrong}"
        for request in [*self.running, *self.loading]:
            assert self.engine.reads_good(request, request.num_computed_tokens), (
                f"{request.request_id} reads wrong bytes and was not named"
            )
        for request in self.swapped:
            tables = self.engine.swapper._host._tables[request.request_id]
            assert self.engine.reads_good(request, request.num_computed_tokens, tables), (
                f"{request.request_id} is swapped out with wrong bytes and was not named"
            )


def live(seed, folder, kind=None):
    """Run one life. A finding says where it happened."""
    life = FailingLife(seed, folder, kind)
    try:
        return life.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, kind {life.kind!r}: {' '.join(life.log)}")
        raise
