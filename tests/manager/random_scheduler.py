"""`RandomScheduler`: a random scheduler over a `TokenEngine`, compared with a slow model.

A step:   between steps: fork, preempt, abort, reset, evict, finish transfers, take slots early
          look up, can_allocate, allocate_slots for some running and waiting requests     as in the model
          no block has two writers                                                       T8
          take_block_copies, the engine copies, writes, and reads all tokens that are attended to
          update counts, sample, finish; check every invariant; each request reads what its next token needs
"""

import random
from collections import Counter
from dataclasses import dataclass

from manager.slow_manager_model import (
    count_blocks,
    count_free_blocks,
    count_longest_hit,
    expect_allocation,
    find_first_kept,
    list_to_cache,
)
from manager.token_engine import TokenEngine, mix

from kv_pool import (
    AllocStatus,
    BlockHasher,
    BlockPool,
    EncoderOnlyAttentionSpec,
    InvalidArgumentError,
    KVCacheManager,
    MambaSpec,
    MultiModalFeature,
    PlaceholderRange,
    Request,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager.block_groups.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from kv_pool.manager.invariants import check_manager, check_writes
from kv_pool.manager.prefix_rules import PrefixRules

VOCABULARY = 6


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model configuration, and a pool for it."""

    name: str
    groups: tuple[KVCacheSpec, ...]
    num_blocks: int
    hash_block_size: int = 4
    watermark: float = 0.0
    max_model_len: int = 48
    caching: bool = True
    runs: bool = False
    bounded: bool = False
    """With `PrefixRules(bounded_states=True)`, whose counts the model does not compute."""

    @property
    def has_states(self):
        return any(isinstance(spec, MambaSpec) for spec in self.groups)

    @property
    def has_encoder(self):
        return any(isinstance(spec, CrossAttentionSpec) for spec in self.groups)


class Sequence:
    """A request, the KV that its tokens must have, and its scheduler's state."""

    def __init__(self, request, length, encoder, delays):
        self.request = request
        self.length = length
        self.encoder = encoder
        """The KV of the encoder's tokens."""
        self.delays = delays
        """Whether only `cache_blocks` caches its blocks."""
        self.digests = []
        self.note_tokens()

    @property
    def name(self):
        return self.request.request_id

    def note_tokens(self):
        first = 1
        for kv in self.encoder:  # the decoder attends to all of it
            first = mix(first, kv)
        for token in self.request.all_token_ids[len(self.digests) :]:
            self.digests.append(mix(self.digests[-1] if self.digests else first, token))

    def extend(self, drafts):
        """Return the digests of all tokens, and of speculative tokens after them."""
        digests = list(self.digests)
        for token in drafts:
            digests.append(mix(digests[-1], token))
        return digests


class RandomScheduler:
    """See the module docstring. `done` counts events, so that a test can check that they occurred."""

    def __init__(self, setup, seed):
        self.rng = random.Random(f"{setup.name} {seed}")
        self.setup = setup
        pool_class = RunBlockPool if setup.runs else BlockPool
        self.pool = pool_class(setup.num_blocks + 1, setup.caching, setup.hash_block_size)
        self.engine = TokenEngine(setup.num_blocks + 1, setup.groups)
        self.manager = KVCacheManager(
            self.pool,
            groups=setup.groups,
            max_model_len=setup.max_model_len,
            watermark=setup.watermark,
            prefix_rules=PrefixRules(bounded_states=True, partial_hits=False) if setup.bounded else None,
        )
        self.hasher = BlockHasher("sha256", "s", setup.hash_block_size)
        self.encoders = [[self.rng.getrandbits(60) for _ in range(size)] for size in (1, 5, 8)]
        self.documents = [self._draw_tokens(setup.max_model_len) for _ in range(4)]
        self.waiting, self.running, self.loading = [], [], {}
        self.scheduled, self.to_write, self.unwritten = [], [], set()
        self.done = Counter()
        self.num_arrived = 0

    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()
        self.drain()

    def drain(self):
        """End all requests and check that no block is in use."""
        for sequence in [*self.running, *self.loading]:
            self.manager.free(sequence.request)
        self.running, self.loading = [], {}
        assert self.manager.list_request_ids() == []
        assert self.manager.take_block_copies() == []
        check_manager(self.manager, [])
        assert self.manager.get_num_free_blocks() == self.setup.num_blocks
        assert self.manager.reset_prefix_cache()

    def step(self):
        self._between_steps()
        for sequence in self.rng.sample(self.running, len(self.running)):
            if sequence in self.running and self.rng.random() < 0.85:
                self._schedule(sequence)
        for sequence in self.rng.sample(self.waiting, min(2, len(self.waiting))):
            self._admit(sequence)
        self._run_engine()
        self._check()

    # ---- between steps ---------------------------------------------------------------------------

    def _between_steps(self):
        rng = self.rng
        if len(self.waiting) < 4 and rng.random() < 0.5:
            self._arrive()
        for sequence in [one for one in self.loading if rng.random() < 0.3]:
            self._finish_loading(sequence)
        for _ in range(2):
            if self.running and rng.random() < 0.08:
                self._take_slots_early(rng.choice(self.running))
            if self.running and rng.random() < 0.15:
                self._fork(rng.choice(self.running))
            if self.running and rng.random() < 0.03:
                self._preempt(rng.choice(self.running))
            if rng.random() < 0.03:
                self._abort()
        late = [one for one in self.running if one.delays]
        if late and rng.random() < 0.3:
            one = rng.choice(late)
            self.manager.cache_blocks(one.request, one.request.num_computed_tokens)
            self.done["cached late"] += 1
        if self.running and rng.random() < 0.06:
            self._truncate(rng.choice(self.running))
        if rng.random() < 0.03:
            self.pool.evict_blocks(rng.sample(range(1, self.setup.num_blocks + 1), 2))
        if rng.random() < (0.01 if self.running or self.loading else 0.2):
            is_idle = not self.manager.list_request_ids()
            assert self.manager.reset_prefix_cache() == is_idle
            self.done["reset"] += is_idle

    def _truncate(self, sequence):
        """Withdraw the last tokens of a request; some groups cannot go back."""
        request = sequence.request
        num_tokens = self.rng.randint(max(1, request.num_tokens - 9), request.num_tokens)
        num_computed = request.num_computed_tokens
        can_go_back = num_tokens >= num_computed or not any(
            isinstance(spec, MambaSpec)
            or (
                spec.is_cacheable
                and any(
                    block_id == 0
                    for block_id in self._get_table(sequence, group_id)[
                        find_first_kept(spec, num_tokens) : num_tokens // spec.block_size + 1
                    ]
                )
            )
            for group_id, spec in enumerate(self.setup.groups)
        )
        try:
            self.manager.truncate(request, num_tokens)
        except InvalidArgumentError:
            assert not can_go_back
            assert request.num_computed_tokens == num_computed
            return
        assert can_go_back
        assert (request.num_tokens, request.num_computed_tokens) == (
            num_tokens,
            min(num_tokens, num_computed),
        )
        del sequence.digests[num_tokens:]
        if request.num_computed_tokens == num_tokens:
            request.append_output_token_ids(self._draw_tokens(1))
        sequence.note_tokens()
        self.done["truncated"] += 1

    def _arrive(self):
        rng = self.rng
        length = rng.randrange(2, self.setup.max_model_len + 1)
        num_prompt = rng.randrange(1, length)
        num_shared = rng.randrange(num_prompt + 1)
        tokens = rng.choice(self.documents)[:num_shared]
        tokens += self._draw_tokens(num_prompt - num_shared)
        if rng.random() < 0.1:
            rng.choice(self.documents)[:num_prompt] = tokens
        encoder = rng.choice(self.encoders) if self.setup.has_encoder else []
        is_named = rng.random() < 0.75  # the others do not say what the encoder read
        sequence = self._make_sequence(tokens, length, encoder, rng.random() < 0.15, is_named)
        self.waiting.append(sequence)

    def _make_sequence(self, tokens, length, encoder, delays, is_named=True):
        self.num_arrived += 1
        features = salt = None
        if encoder and is_named:
            audio = self.encoders.index(encoder)
            features = [MultiModalFeature(f"audio {audio}", PlaceholderRange(0, len(encoder)))]
        elif any(isinstance(spec, EncoderOnlyAttentionSpec) for spec in self.setup.groups):
            salt = "one prompt"
        request = Request(f"r{self.num_arrived}", tokens, self.hasher, mm_features=features, cache_salt=salt)
        return Sequence(request, length, encoder, delays)

    def _finish_loading(self, sequence):
        """Finish a transfer of external tokens."""
        self._write_all(sequence, self.loading.pop(sequence), sequence.request.num_computed_tokens)
        self.manager.cache_blocks(sequence.request, sequence.request.num_computed_tokens)
        self.running.append(sequence)
        self.done["loaded"] += 1

    def _take_slots_early(self, sequence):
        """Take slots and copies for a step that runs later, or never."""
        request = sequence.request
        num_new = (
            0
            if self.setup.has_states
            else self.rng.randrange(request.num_tokens - request.num_computed_tokens)
        )
        if self._allocate(sequence, num_new, delay_cache_blocks=True) is not None:
            self.done["slots taken early"] += 1
            if self.rng.random() < 0.3:
                child = self._fork(sequence)  # copies into its blocks may still be pending
                if child is not None and self.rng.random() < 0.5:
                    self._take_slots_early(child)

    def _fork(self, parent):
        num_computed = parent.request.num_computed_tokens
        if not num_computed or num_computed >= self.setup.max_model_len - 1 or len(self.running) > 8:
            return None
        most = min(parent.request.num_tokens, self.setup.max_model_len - 1)
        num_common = self.rng.randint(num_computed, most)
        tokens = parent.request.all_token_ids[:num_common]
        tokens += self._draw_tokens(self.rng.randint(0 if num_common > num_computed else 1, 1))
        length = self.rng.randint(len(tokens), self.setup.max_model_len)
        is_named = parent.request.mm_features is not None
        child = self._make_sequence(tokens, length, parent.encoder, parent.delays, is_named)
        child.request.num_computed_tokens = num_computed
        self.manager.fork(parent.request, child.request)
        for group_id, spec in enumerate(self.setup.groups):
            shared = self._get_table(parent, group_id)
            if spec.is_cacheable:
                shared = shared[: count_blocks(spec, num_computed)]
            assert self._get_table(child, group_id) == shared
        self.running.append(child)
        self.done["forks"] += 1
        return child

    def _preempt(self, sequence):
        self._end(sequence)
        sequence.request.num_computed_tokens = 0
        self.waiting.append(sequence)
        self.done["preemptions"] += 1

    def _abort(self):
        held = [*self.running, *self.loading]
        if held:
            self._end(self.rng.choice(held))
            self.done["aborts"] += 1

    def _end(self, sequence):
        tables = self._list_tables(sequence)
        released = self._list_last_held(block_id for table in tables for block_id in reversed(table))
        self.manager.free(sequence.request)
        self._check_order(released)
        if sequence in self.loading:
            del self.loading[sequence]
        else:
            self.running.remove(sequence)

    # ---- scheduling ------------------------------------------------------------------------------

    def _schedule(self, sequence):
        """Allocate the next tokens of a running request; preempt other requests until they fit."""
        rng, request = self.rng, sequence.request
        num_left = request.num_tokens - request.num_computed_tokens
        num_new = self._draw_step(num_left, request.num_computed_tokens)
        drafts = []
        if num_new == num_left and not self.setup.has_states and rng.random() < 0.3:
            room = self.setup.max_model_len - request.num_tokens
            drafts = self._draw_tokens(min(rng.randint(1, 5), room))
        options = {"num_lookahead_tokens": rng.choice((0, 0, 0, 1, 5)), "delay_cache_blocks": sequence.delays}
        while True:
            is_given = self._allocate(sequence, num_new + len(drafts), **options)
            if is_given:
                break
            victims = [
                one
                for one in [*self.running, *self.loading]
                if one is not sequence and not self._is_scheduled(one)
            ]
            if self.last_status is AllocStatus.NEVER:
                self._end(sequence)
                self.done["too large"] += 1
                return
            if not victims or rng.random() < 0.3:
                if rng.random() < 0.5:
                    self._preempt(sequence)
                return
            self._preempt(rng.choice(victims))
        self.done["lookahead"] += bool(options["num_lookahead_tokens"])
        self.scheduled.append((sequence, num_new, drafts))
        self._note_states(sequence, num_new)

    def _admit(self, sequence):
        """Look up and allocate for a waiting request."""
        rng, request = self.rng, sequence.request
        most = request.num_tokens if rng.random() < 0.1 else request.num_tokens - 1
        prefix = self.manager.get_computed_blocks(request, None if most < request.num_tokens else most)
        assert prefix.num_tokens == count_longest_hit(self.manager, request, most)
        if rng.random() < 0.05:
            prefix = None
        num_hit = 0 if prefix is None else prefix.num_tokens
        num_left = request.num_tokens - num_hit
        num_external = rng.randint(1, num_left - 1) if num_left > 1 and rng.random() < 0.2 else 0
        if self.setup.bounded:
            num_external = 0  # with rules a connector writes a state to each block, which the engine does not
        num_left -= num_external
        is_loaded = num_external and rng.random() < 0.5
        if is_loaded or (num_hit and rng.random() < 0.05):
            num_new = 0
        else:
            num_new = self._draw_step(num_left, num_hit + num_external)
        is_given = self._allocate(
            sequence,
            num_new,
            prefix,
            num_lookahead_tokens=0 if is_loaded else rng.choice((0, 0, 3)),
            num_external_computed_tokens=num_external,
            delay_cache_blocks=bool(is_loaded) or sequence.delays,
            num_encoder_tokens=len(sequence.encoder),
            full_sequence_must_fit=rng.random() < 0.2,
            reserved_blocks=rng.choice((0, 0, 0, 1)) if self.running else 0,
        )
        if not is_given:
            if self.last_status is AllocStatus.NEVER:
                self.waiting.remove(sequence)
                self.done["too large"] += 1
            elif not (self.running or self.loading):
                raise AssertionError(f"{sequence.name} waits for blocks that no request holds")
            self.done["refusals"] += 1
            return
        for group_id, hits in enumerate([] if prefix is None else prefix.blocks):
            assert self.manager.get_table(sequence.name, group_id).num_cached_blocks >= len(hits)
        self.waiting.remove(sequence)
        self.done["hits"] += bool(num_hit)
        self.done["external"] += bool(num_external)
        request.num_computed_tokens = num_hit + num_external
        self.to_write.append((sequence, num_hit, 0 if is_loaded else num_external))
        if is_loaded:
            self.loading[sequence] = num_hit
        else:
            self.running.append(sequence)
            self.scheduled.append((sequence, num_new, []))
            self._note_states(sequence, num_new)

    def _allocate(self, sequence, num_new, prefix=None, **options):
        """Allocate slots and compare success and result with the model."""
        manager, request = self.manager, sequence.request
        expected = expect_allocation(
            manager,
            request,
            num_new,
            prefix,
            unwritten=self.unwritten,
            max_model_len=self.setup.max_model_len,
            **options,
        )
        asked = {name: value for name, value in options.items() if name != "delay_cache_blocks"}
        self.done["waits for a state"] += expected.waits
        self.last_status = manager.can_allocate(request, num_new, prefix, **asked)
        if self.setup.bounded:
            expected.status = self.last_status
        assert self.last_status is expected.status, (sequence.name, num_new, self.last_status, expected)
        num_free = count_free_blocks(manager)
        gone = self._list_last_held(expected.released)
        before = self._list_tables(sequence) if manager.holds_blocks(sequence.name) else None
        edits = self._count_edits(sequence) if before else None
        added = manager.allocate_slots(request, num_new, prefix, **options)
        assert (added is not None) == (expected.status is AllocStatus.OK)
        self.done["given" if added is not None else "not given"] += 1
        num_taken = num_free - count_free_blocks(manager)
        self._check_order(gone)
        if added is None:
            assert num_taken in (0, -expected.num_released)
            return None
        is_cached = self.setup.caching and (not sequence.encoder or request.mm_features)
        if is_cached and not options.get("delay_cache_blocks") and not self.setup.bounded:
            for group_id, position in list_to_cache(manager, request, num_new, expected.num_before):
                block = manager.get_table(sequence.name, group_id).blocks[position]
                assert block.is_null or block.block_hash is not None, (group_id, position)
        assert self.setup.bounded or num_taken == expected.num_taken, (sequence.name, num_taken, expected)
        after = self._list_tables(sequence)
        assert [len(table) for table in after] == expected.num_entries
        if before:
            for old, new, num_edits, now in zip(
                before, after, edits, self._count_edits(sequence), strict=True
            ):
                assert (new[: len(old)] == old) == (num_edits == now)
        return added

    def _draw_step(self, num_left, num_computed):
        """Return how many tokens to compute; with states, often up to the end of a block."""
        if not num_left:
            return 0
        num_new = self.rng.randint(1, num_left) if self.rng.random() < 0.4 else num_left
        if self.setup.has_states and self.rng.random() < 0.6:
            num_new -= (num_computed + num_new) % 8
        return num_new if num_new > 0 else num_left

    def _list_last_held(self, block_ids):
        """Return those of these blocks that are cached and that no other request holds, in order."""
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        return [block.block_id for block in blocks if block.ref_cnt == 1 and block.block_hash is not None]

    def _check_order(self, released):
        """Check that these blocks, if still free, are last in the queue, in this order."""
        if self.setup.runs:
            return
        queue = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        left = [block_id for block_id in released if block_id in queue]
        assert queue[len(queue) - len(left) :] == left

    def _is_scheduled(self, sequence):
        return any(one is sequence for one, _, _ in self.scheduled) or any(
            one is sequence for one, _, _ in self.to_write
        )

    def _note_states(self, sequence, num_new):
        """Record the keys of states that this step writes; a written copy has the same key."""
        for group_id, spec in enumerate(self.setup.groups):
            if isinstance(spec, MambaSpec) and (num_new or sequence in (one for one, _, _ in self.to_write)):
                num_tokens = sequence.request.num_computed_tokens + num_new
                block = self.manager.get_table(sequence.name, group_id).blocks[
                    (num_tokens - 1) // spec.block_size
                ]
                is_hit = not num_new and not any(one is sequence and n for one, _, n in self.to_write)
                if block.block_hash is not None and not is_hit:
                    self.unwritten.add(block.block_hash)
                for one, num_hit, num_external in self.to_write:
                    num_loaded = num_hit + num_external
                    if one is sequence and num_external and num_loaded % spec.block_size == 0:
                        loaded = self.manager.get_table(sequence.name, group_id).blocks[
                            num_loaded // spec.block_size - 1
                        ]
                        if loaded.block_hash is not None:
                            self.unwritten.add(loaded.block_hash)

    # ---- running ---------------------------------------------------------------------------------

    def _run_engine(self):
        writes = dict.fromkeys([*self.running, *self.loading], 0)
        writes.update((one, num_new + len(drafts)) for one, num_new, drafts in self.scheduled)
        check_writes(self.manager, [(one.request, num_tokens) for one, num_tokens in writes.items()])
        self.unwritten = set()
        self.apply_copies()
        for sequence, num_hit, num_external in self.to_write:
            self._write_all(sequence, num_hit, num_hit + num_external)
            for group_id, spec in enumerate(self.setup.groups):
                if isinstance(spec, CrossAttentionSpec):
                    self.engine.write(group_id, self._get_table(sequence, group_id), 0, sequence.encoder)
        self._for_each(self._check_start)
        self._for_each(self._write_step)
        self._for_each(self._check_step)
        for sequence, num_new, drafts in self.scheduled:
            self._count_up(sequence, num_new, drafts)
        self.scheduled, self.to_write = [], []

    def apply_copies(self):
        moves = self.manager.take_block_copies()
        self.done["copies"] += len(moves)
        self.engine.copy(moves)

    def _for_each(self, act):
        for sequence, num_new, drafts in self.scheduled:
            for group_id, spec in enumerate(self.setup.groups):
                if spec.is_cacheable and num_new:
                    act(sequence, group_id, num_new + len(drafts), sequence.extend(drafts))

    def _check_start(self, sequence, group_id, num_new, digests):
        if isinstance(self.setup.groups[group_id], MambaSpec):
            num_computed = sequence.request.num_computed_tokens
            self.engine.check_state(group_id, self._get_table(sequence, group_id), num_computed, digests)

    def _write_step(self, sequence, group_id, num_new, digests):
        first = sequence.request.num_computed_tokens
        table = self._get_table(sequence, group_id)
        self.engine.write(group_id, table, first, digests[first : first + num_new])

    def _check_step(self, sequence, group_id, num_new, digests):
        if not isinstance(self.setup.groups[group_id], MambaSpec):
            first = sequence.request.num_computed_tokens
            table = self._get_table(sequence, group_id)
            self.engine.check_reads(group_id, table, first, first + num_new, digests)

    def _write_all(self, sequence, first, end):
        """Write the external tokens of all groups, as far as any request reads them."""
        for group_id, spec in enumerate(self.setup.groups):
            if spec.is_cacheable and end > first:
                self.engine.write(
                    group_id, self._get_table(sequence, group_id), first, sequence.digests[first:end]
                )

    def _count_up(self, sequence, num_new, drafts):
        request, rng = sequence.request, self.rng
        request.num_computed_tokens += num_new
        if request.num_computed_tokens < request.num_tokens:
            return
        num_accepted = rng.randint(0, len(drafts))
        request.num_computed_tokens += num_accepted
        self.done["rejected"] += len(drafts) - num_accepted
        room = self.setup.max_model_len - request.num_tokens - num_accepted
        request.append_output_token_ids([*drafts[:num_accepted], *self._draw_tokens(min(1, room))])
        sequence.note_tokens()
        if request.num_tokens >= sequence.length or request.num_computed_tokens == request.num_tokens:
            self._end(sequence)
            self.done["finished"] += 1

    # ---- checking --------------------------------------------------------------------------------

    def _check(self):
        check_manager(self.manager, [one.request for one in [*self.running, *self.loading]])
        for sequence in self.running:
            num_computed = sequence.request.num_computed_tokens
            for group_id, spec in enumerate(self.setup.groups):
                table = self._get_table(sequence, group_id)
                if isinstance(spec, MambaSpec):
                    self.engine.check_state(group_id, table, num_computed, sequence.digests)
                elif isinstance(spec, CrossAttentionSpec):
                    self.engine.check_reads(group_id, table, 0, len(sequence.encoder), sequence.encoder)
                elif spec.is_cacheable:
                    self.engine.check_reads(group_id, table, num_computed, num_computed, sequence.digests)
        self.done["steps"] += 1

    def _get_table(self, sequence, group_id):
        return self.manager.get_block_ids(sequence.name, group_id)

    def _list_tables(self, sequence):
        return [self._get_table(sequence, group_id) for group_id in range(len(self.setup.groups))]

    def _count_edits(self, sequence):
        return [
            self.manager.get_table(sequence.name, group_id).num_edits
            for group_id in range(len(self.setup.groups))
        ]

    def _draw_tokens(self, count):
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]
