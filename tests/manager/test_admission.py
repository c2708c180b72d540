"""`can_allocate` and `fits_alone` know which blocks pins keep."""

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    KVCacheManager,
    Request,
    RetentionDirective,
)
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec

HASHER = BlockHasher("sha256", "s", 4)


def make_pinned(num_blocks=8, groups=None, **directive):
    """A manager of which 7 blocks are pinned: a system prompt of 28 tokens."""
    pool = BlockPool(num_blocks + 1, True, 4)
    retention = BlockRetention(pool, clock=lambda: 0.0, max_pinned_blocks=2 * num_blocks)
    manager = KVCacheManager(pool, groups=groups, retention=retention)
    system = Request("system", range(28), HASHER)
    retention.set_directives("system", [RetentionDirective(0, 28, pin=True, **directive)])
    assert manager.allocate_slots(system, 28, manager.get_computed_blocks(system)) is not None
    system.num_computed_tokens = 28
    return manager, system


def test_blocks_pinned_without_a_deadline_never_become_free():
    """The answers were True and LATER, and the request waited for ever, alone."""
    manager, system = make_pinned()
    manager.free(system)
    alone = Request("alone", range(100, 108), HASHER)
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
    alone = Request("alone", range(100, 108), HASHER)
    assert manager.can_allocate(alone, 8) is AllocStatus.NEVER
    assert not manager.fits_alone(8)
    manager.free(system)
    assert manager.can_allocate(alone, 8) is AllocStatus.NEVER


def test_a_request_that_hits_pinned_blocks_uses_them():
    manager, system = make_pinned()
    manager.free(system)
    chat = Request("chat", range(32), HASHER)
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
    other = Request("other", range(100, 104), HASHER)
    assert manager.can_allocate(other, 4) is AllocStatus.LATER
    manager.free(chat)
    assert manager.can_allocate(other, 4) is AllocStatus.OK


def test_the_answers_about_pins_come_true_with_windows():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=5)]
    manager, system = make_pinned(16, groups)
    manager.free(system)
    num_free = manager.get_num_free_blocks()
    for num_tokens in range(1, 20):
        request = Request(f"r{num_tokens}", range(100, 100 + num_tokens), HASHER)
        answer = manager.can_allocate(request, num_tokens)
        assert answer is (AllocStatus.OK if manager.fits_alone(num_tokens) else AllocStatus.NEVER)
        assert (manager.allocate_slots(request, num_tokens) is not None) == (answer is AllocStatus.OK)
        if answer is AllocStatus.OK:
            manager.free(request)
        assert manager.get_num_free_blocks() == num_free
