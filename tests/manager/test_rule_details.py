"""`RuleDetails` by example: what an engine with the rules of an older release of vLLM caches and finds."""

import pytest
from manager.table_drawing import draw, make_manager, make_request, start, stop, take_copies
from manager.test_prefix_rules import FULL, STATE, WINDOW, count_hits, step

from kv_pool import InvalidTypeError, PrefixRules
from kv_pool.manager.prefix_rules import RuleDetails


def make(*groups, hash_block_size=4, num_blocks=40, rules=None, **details):
    prefix_rules = PrefixRules(**(rules or {}), details=RuleDetails(**details))
    return make_manager(groups, num_blocks, hash_block_size, prefix_rules=prefix_rules)


@pytest.mark.parametrize(
    ("doubles", "drawn"),
    [(True, "20 21* 22* 23* 24* 25* 26"), (False, "20 21 22* 23* 24* 25* 26")],
)
def test_the_block_before_a_junction_is_cached(doubles, drawn):
    manager = make(FULL, WINDOW, rules={"eagle_groups": [1]}, doubles_junctions=doubles)
    a, b = make_request("a", range(22)), make_request("b", [*range(12), *range(50, 64)])
    start(manager, a)
    assert manager.get_computed_blocks(b).junction == 12
    start(manager, b)
    assert draw(manager, b) == f"13* 14* 15* 16* 17* 18* 19 / {drawn}"
    stop(manager, a, b)


@pytest.mark.parametrize("renews", [True, False])
def test_a_state_that_is_cached_again_is_hit_in_the_next_step(renews):
    manager = make(FULL, STATE, renews_states=renews)
    a, b = make_request("a", range(9)), make_request("b", range(9))
    step(manager, a, 8)
    manager.begin_step()
    manager.cache_blocks(a, 8)
    prefix = manager.get_computed_blocks(b)
    assert prefix.num_tokens == 8
    assert (manager.allocate_slots(b, 1, prefix) is None) == renews
    if renews:
        manager.begin_step()
        assert manager.allocate_slots(b, 1, prefix) is not None
    b.num_computed_tokens = 9
    stop(manager, a, b)


@pytest.mark.parametrize(("looks_past", "num_hits"), [(True, 16), (False, 0)])
def test_the_dropped_block_may_lie_behind_the_longest_hit(looks_past, num_hits):
    """A prompt of 20 tokens can hit at most 19, and the drafter needs the block that ends with the 20th."""
    manager = make(FULL, WINDOW, rules={"eagle_groups": [0]}, looks_past_limit=looks_past)
    a = make_request("a", range(24))
    start(manager, a)
    assert count_hits(manager, range(20)) == num_hits
    assert count_hits(manager, range(21)) == 16
    stop(manager, a)


@pytest.mark.parametrize(
    ("whole", "drawn", "num_hits"), [(True, "1* 2* 4* / - 3* 5*", 10), (False, "1* 2* 4 / - 3* 5", 8)]
)
def test_the_end_of_a_prompt_is_cached_with_its_last_token(whole, drawn, num_hits):
    manager = make(FULL, STATE, hash_block_size=2, caches_whole_prompts=whole)
    a = make_request("a", range(10), 2)
    step(manager, a, 8)
    step(manager, a, 10)
    assert draw(manager, a) == drawn
    assert count_hits(manager, range(10), 2) == 8
    assert count_hits(manager, [*range(10), 70, 71], 2) == num_hits
    stop(manager, a)


@pytest.mark.parametrize(("within", "drawn"), [(True, "1* 2* / - 3"), (False, "1* 2* / - 3*")])
def test_the_end_of_a_prompt_is_cached_at_the_end_of_a_block(within, drawn):
    manager = make(FULL, STATE, hash_block_size=2, rules={"eagle_groups": [0]}, ends_within_blocks=within)
    a = make_request("a", range(11), 2)
    step(manager, a, 8)
    assert draw(manager, a) == drawn
    stop(manager, a)


@pytest.mark.parametrize(("own_only", "end"), [(True, 10), (False, 8)])
def test_the_end_of_a_prompt_depends_on_the_drafters_group(own_only, end):
    manager = make(FULL, STATE, hash_block_size=2, rules={"eagle_groups": [0]}, own_drafter_only=own_only)
    cached = []
    for last in (8, 10):
        a = make_request("a", range(11), 2)
        step(manager, a, last)
        if draw(manager, a).endswith("*"):
            cached.append(last)
        manager.free(a)
        take_copies(manager)
        manager.reset_prefix_cache()
    assert cached == [end]
    stop(manager)


@pytest.mark.parametrize("counts_most", [True, False])
def test_a_copied_state_is_counted_as_a_copy_and_a_block(counts_most):
    """The hit takes the cached state and its copy, and a copy of the last block of full attention."""
    manager = make(FULL, STATE, hash_block_size=2, num_blocks=7, counts_most_states=counts_most)
    a, b = make_request("a", range(11), 2), make_request("b", range(11), 2)
    for end in (8, 10, 11):
        step(manager, a, end)
        take_copies(manager)
    assert manager.get_num_free_blocks() == 3
    prefix = manager.get_computed_blocks(b)
    assert (manager.allocate_slots(b, 1, prefix) is None) == counts_most
    take_copies(manager)
    stop(manager, a, *([] if counts_most else [b]))


def test_wrong_details_are_refused():
    with pytest.raises(InvalidTypeError, match="details"):
        PrefixRules(details={"renews_states": True})
