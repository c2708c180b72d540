"""`can_allocate` predicts `allocate_slots`: compared after random histories, by trying the allocation.

OK: the call succeeds. LATER: it fails, and succeeds once all other requests have released their blocks.
NEVER: it fails then, too.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    KVCacheManager,
    Request,
    RetentionDirective,
)
from kv_pool.core import invariants
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 2
HASHER = BlockHasher("sha256", "s", BLOCK_SIZE)

FULL = FullAttentionSpec(block_size=2)
FULL_4 = FullAttentionSpec(block_size=4)
WINDOW = SlidingWindowSpec(block_size=2, sliding_window=3)
CHUNK = ChunkedLocalAttentionSpec(block_size=2, attention_chunk_size=4)
MAMBA = MambaSpec(block_size=2)
CROSS = CrossAttentionSpec(block_size=2)

MODELS = {
    "full": [FULL],
    "window": [WINDOW],
    "chunk": [CHUNK],
    "mamba": [MAMBA],
    "full and window": [FULL, WINDOW],
    "full and mamba": [FULL_4, MAMBA],
    "full and cross": [FULL, CROSS],
}


@dataclass
class World:
    """A manager and its requests, recreated from the start to try another future."""

    manager: KVCacheManager
    requests: dict[str, Request] = field(default_factory=dict)

    def request(self, name):
        """Names that differ in the second letter share their first four tokens only."""
        if name not in self.requests:
            first = 1000 * ord(name[0])
            own = first + 100 * ord(name[-1])
            self.requests[name] = Request(name, [*range(first, first + 4), *range(own, own + 2)], HASHER)
        return self.requests[name]

    def apply(self, step):
        """Make one call of a history, if it is possible."""
        what, name, *numbers = step
        request = self.request(name)
        holds = self.manager.holds_blocks(name)
        match what:
            case "grow":
                num_tokens, num_lookahead = numbers
                prefix = None
                if not holds:
                    prefix = self.manager.get_computed_blocks(request)
                if self.allocate(request, num_tokens, prefix, num_lookahead_tokens=num_lookahead) is None:
                    return
                computed = request.num_computed_tokens + (prefix.num_tokens if prefix else 0) + num_tokens
                if self.manager.max_model_len:  # no slots beyond this length
                    computed = min(computed, self.manager.max_model_len)
                if computed > request.num_tokens:
                    request.append_output_token_ids(range(computed - request.num_tokens))
                request.num_computed_tokens = computed
            case "fork":
                child = self.request(numbers[0])
                if not holds or self.manager.holds_blocks(child.request_id):
                    return
                child.all_token_ids = list(request.all_token_ids)
                child.block_hashes = list(request.block_hashes)
                child.num_computed_tokens = request.num_computed_tokens
                self.manager.fork(request, child)
            case "free":
                if holds:
                    self.manager.free(request)
                    request.num_computed_tokens = 0
            case "copy":
                self.manager.take_block_copies()

    def allocate(self, request, num_tokens, prefix, **options):
        if CROSS in self.manager.groups:
            options["num_encoder_tokens"] = 3
        return self.manager.allocate_slots(request, num_tokens, prefix, **options)

    def free_others(self, request):
        self.manager.take_block_copies()
        for name in self.manager.list_request_ids():
            if name != request.request_id:
                self.manager.free(self.requests[name])


def check_promise(make, name, num_tokens, **options):
    """Compare one prediction with the outcome. Each future starts in a new world."""
    world = make()
    request = world.request(name)
    prefix = None
    if not world.manager.holds_blocks(name):
        prefix = world.manager.get_computed_blocks(request)
    asked = dict(options)
    if CROSS in world.manager.groups:
        asked["num_encoder_tokens"] = 3
    answer = world.manager.can_allocate(request, num_tokens, prefix, **asked)
    fits_now = world.allocate(request, num_tokens, prefix, **options) is not None
    invariants.check(world.manager.block_pool)

    alone = make()
    request = alone.request(name)
    prefix = None
    if not alone.manager.holds_blocks(name):
        prefix = alone.manager.get_computed_blocks(request)
    alone.free_others(request)
    fits_alone = alone.allocate(request, num_tokens, prefix, **options) is not None

    happened = AllocStatus.OK if fits_now else AllocStatus.LATER if fits_alone else AllocStatus.NEVER
    assert answer is happened, (name, num_tokens, options)


numbers = st.integers(0, 9)
steps = st.one_of(
    st.tuples(st.just("grow"), st.sampled_from(["aa", "ab", "ba", "b", "c"]), numbers, st.integers(0, 4)),
    st.tuples(st.just("fork"), st.sampled_from(["aa", "ab", "b"]), st.sampled_from(["c", "d", "e"])),
    st.tuples(st.just("free"), st.sampled_from(["aa", "ab", "b", "c", "d"])),
    st.tuples(st.just("copy"), st.just("aa")),
)


@settings(max_examples=300, deadline=None)
@given(
    model=st.sampled_from(list(MODELS)),
    num_blocks=st.integers(1, 14),
    past=st.lists(steps, max_size=14),
    limits=st.fixed_dictionaries(
        {"watermark": st.sampled_from([0.0, 0.1, 0.5])},
        optional={"max_model_len": st.integers(8, 40), "max_in_flight_tokens": st.integers(1, 20)},
    ),
    num_tokens=numbers,
    options=st.fixed_dictionaries(
        {},
        optional={
            "num_lookahead_tokens": numbers,
            "num_external_computed_tokens": numbers,
            "reserved_blocks": st.integers(0, 6),
            "full_sequence_must_fit": st.booleans(),
        },
    ),
)
def test_can_allocate_is_right_after_random_histories(model, num_blocks, past, limits, num_tokens, options):
    def make():
        world = World(
            KVCacheManager(BlockPool(num_blocks + 1, True, BLOCK_SIZE), groups=MODELS[model], **limits)
        )
        for step in past:
            world.apply(step)
        return world

    manager = make().manager
    for name in {"ab", *manager.list_request_ids()}:
        asked = dict(options)
        if manager.holds_blocks(name):
            asked.pop("num_external_computed_tokens", None)
        check_promise(make, name, num_tokens, **asked)


# ---- pins ----------------------------------------------------------------------------------------


def make_pinned(num_blocks=8, groups=None, **directive):
    """A manager of which 7 blocks are pinned: a system prompt of 28 tokens."""
    pool = BlockPool(num_blocks + 1, True, 4)
    retention = BlockRetention(pool, clock=lambda: 0.0, max_pinned_blocks=2 * num_blocks)
    manager = KVCacheManager(pool, groups=groups, retention=retention)
    system = Request("system", range(28), PIN_HASHER)
    retention.set_directives("system", [RetentionDirective(0, 28, pin=True, **directive)])
    assert manager.allocate_slots(system, 28, manager.get_computed_blocks(system)) is not None
    system.num_computed_tokens = 28
    return manager, system


PIN_HASHER = BlockHasher("sha256", "s", 4)


def test_blocks_pinned_without_a_deadline_never_become_free():
    """The answers were True and LATER, and the request waited for ever, alone."""
    manager, system = make_pinned()
    manager.free(system)
    alone = Request("alone", range(100, 108), PIN_HASHER)
    assert not manager.fits_alone(8)
    assert manager.can_allocate(alone, 8) is AllocStatus.NEVER
    assert manager.allocate_slots(alone, 8) is None
    assert manager.explain_fit(8).startswith(
        "a request of 8 tokens takes up to 2 of 8 blocks; "
        "7 are pinned without a deadline (1, 2, 3, 4, 5, 6, 7); unpin some"
    )
    assert (manager.fits_alone(4), manager.explain_fit(4)) == (True, "")
    assert manager.can_allocate(alone, 4) is AllocStatus.OK
    manager.retention.change_directives(system, [RetentionDirective(0, 28)])
    assert manager.fits_alone(8)
    assert manager.can_allocate(alone, 8) is AllocStatus.OK


def test_pins_of_a_running_request_count_once_they_are_promised():
    manager, system = make_pinned()
    alone = Request("alone", range(100, 108), PIN_HASHER)
    assert manager.can_allocate(alone, 8) is AllocStatus.NEVER
    assert not manager.fits_alone(8)
    manager.free(system)
    assert manager.can_allocate(alone, 8) is AllocStatus.NEVER


def test_a_request_that_hits_pinned_blocks_uses_them():
    manager, system = make_pinned()
    manager.free(system)
    chat = Request("chat", range(32), PIN_HASHER)
    prefix = manager.get_computed_blocks(chat)
    assert prefix.num_tokens == 28
    assert not manager.fits_alone(32)
    assert manager.fits_alone(32, cached_prefix=prefix)
    assert not manager.fits_alone(33, cached_prefix=prefix)
    assert manager.can_allocate(chat, 4, prefix) is AllocStatus.OK
    assert manager.can_allocate(chat, 5, prefix) is AllocStatus.NEVER
    assert manager.can_allocate(chat, 32) is AllocStatus.NEVER  # without its prefix
    assert manager.allocate_slots(chat, 4, prefix) is not None
    chat.num_computed_tokens = 32
    chat.append_output_token_ids([7])
    assert manager.can_allocate(chat, 1) is AllocStatus.NEVER
    other = Request("other", range(100, 104), PIN_HASHER)
    assert manager.can_allocate(other, 4) is AllocStatus.LATER
    manager.free(chat)
    assert manager.can_allocate(other, 4) is AllocStatus.OK


def test_the_answers_about_pins_come_true_with_windows():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=5)]
    manager, system = make_pinned(16, groups)
    manager.free(system)
    num_free = manager.get_num_free_blocks()
    for num_tokens in range(1, 20):
        request = Request(f"r{num_tokens}", range(100, 100 + num_tokens), PIN_HASHER)
        answer = manager.can_allocate(request, num_tokens)
        assert answer is (AllocStatus.OK if manager.fits_alone(num_tokens) else AllocStatus.NEVER)
        assert (manager.allocate_slots(request, num_tokens) is not None) == (answer is AllocStatus.OK)
        if answer is AllocStatus.OK:
            manager.free(request)
        assert manager.get_num_free_blocks() == num_free
