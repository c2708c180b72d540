"""Groups that keep all tokens, a window, a chunk, a state, the encoder's or none, alone and over one pool."""

import pytest
from drawing import state
from manager.table_drawing import draw, grow, make_manager, make_request, start, stop

from kv_pool import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    InvalidArgumentError,
    MambaSpec,
    MultiModalFeature,
    PlaceholderRange,
    PrefixRules,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=4)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5)
CHUNKS = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8)
STATE = MambaSpec(block_size=4)


# ---- windows -------------------------------------------------------------------------------------


def test_a_window_releases_blocks_the_next_token_does_not_see():
    """Token n sees n - 4 to n. Blocks that no later token sees are released at the next allocation."""
    manager = make_manager((WINDOW,), 6)
    a = make_request("a", range(7))
    start(manager, a)
    assert draw(manager, a) == "1* 2"
    grow(manager, a, [7])  # token 7 sees tokens 3 to 7
    assert draw(manager, a) == "1* 2*"
    grow(manager, a, [8])  # token 8 sees tokens 4 to 8
    assert draw(manager, a) == "- 2* 3"
    assert state(manager.block_pool) == "free: 4 5 6 1* | in use: 2* 3"
    stop(manager, a)


def test_a_window_releases_its_last_block_first():
    manager = make_manager((WINDOW,), 6)
    a = make_request("a", range(14))
    start(manager, a)
    assert draw(manager, a) == "1* 2* 3* 4"
    grow(manager, a, [14])
    assert draw(manager, a) == "- - 3* 4"
    assert state(manager.block_pool) == "free: 5 6 2* 1* | in use: 3* 4"
    stop(manager, a)


def test_blocks_that_left_the_window_are_reused():
    manager = make_manager((WINDOW,), 3)
    a = make_request("a", range(12))
    start(manager, a)
    assert state(manager.block_pool) == "free: | in use: 1* 2* 3*"
    assert grow(manager, a, range(12, 16))
    assert draw(manager, a) == "- - 3* 2*"
    assert state(manager.block_pool) == "free: 1* | in use: 2* 3*"
    stop(manager, a)


def test_a_hit_needs_only_the_blocks_in_the_window():
    manager = make_manager((WINDOW,), 4)
    a = make_request("a", range(12))
    start(manager, a)
    manager.free(a)
    manager.block_pool.evict_blocks([1])
    b = make_request("b", range(13))
    assert start(manager, b) == 12
    assert draw(manager, b) == "- - 3* 4"
    stop(manager, b)


def test_a_hit_ends_before_a_hole_in_the_window():
    manager = make_manager((SlidingWindowSpec(block_size=4, sliding_window=6),), 4)
    a = make_request("a", range(16))
    start(manager, a)
    manager.free(a)
    manager.block_pool.evict_blocks([3])
    assert manager.get_computed_blocks(make_request("b", range(17))).num_tokens == 8
    manager.block_pool.evict_blocks([2])
    assert manager.get_computed_blocks(make_request("b", range(17))).num_tokens == 4


def test_a_window_of_one_token_keeps_the_block_that_is_written():
    manager = make_manager((SlidingWindowSpec(block_size=4, sliding_window=1),), 4)
    a = make_request("a", range(4))
    start(manager, a)
    grow(manager, a, [4])
    assert draw(manager, a) == "- 2"
    stop(manager, a)


def test_rejected_tokens_do_not_shrink_the_window():
    """Five speculative tokens, one accepted: the window of the next token starts from the counted ones."""
    manager = make_manager((WINDOW,), 6)
    a = make_request("a", range(8))
    start(manager, a)
    a.append_output_token_ids([8])
    manager.allocate_slots(a, 1 + 5)
    a.append_output_token_ids([9, 10])
    a.num_computed_tokens = 10
    assert draw(manager, a) == "- 2* 3 4"
    manager.allocate_slots(a, 1)
    assert draw(manager, a) == "- 2* 3 4"  # token 10 sees tokens 6 to 10
    stop(manager, a)


# ---- chunks --------------------------------------------------------------------------------------


def test_a_chunk_is_released_when_the_next_begins():
    manager = make_manager((CHUNKS,), 6)
    a = make_request("a", range(7))
    start(manager, a)
    grow(manager, a, [7])
    assert draw(manager, a) == "1* 2*"
    grow(manager, a, [8])
    assert draw(manager, a) == "- - 3"
    assert state(manager.block_pool) == "free: 4 5 6 2* 1* | in use: 3"
    stop(manager, a)


def test_a_hit_at_the_start_of_a_chunk_needs_no_block():
    manager = make_manager((CHUNKS,))
    a = make_request("a", range(12))
    assert start(manager, a) == 8
    assert draw(manager, a) == "- - 1*"
    stop(manager, a)


def test_a_hit_within_a_chunk_needs_the_chunk_from_its_start():
    manager = make_manager((CHUNKS, FULL))
    a = make_request("a", range(16))
    start(manager, a)
    assert draw(manager, a) == "1* 2* 3* 4* / 5* 6* 7* 8*"
    b = make_request("b", range(15))
    assert start(manager, b) == 12
    assert draw(manager, b) == "- - 3*x2 9 / 5*x2 6*x2 7*x2 10"
    manager.block_pool.evict_blocks([3])
    assert manager.get_computed_blocks(make_request("c", range(15))).num_tokens == 8
    stop(manager, a, b)


@pytest.mark.parametrize(("block_size", "num_tokens"), [(4, 8), (8, 16)])
def test_a_hit_never_ends_in_a_chunk_without_its_start(block_size, num_tokens):
    """Chunks of 6 tokens: a hit was cut to whole blocks after the chunk of its end had been found."""
    groups = (ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=6),)
    manager = make_manager(groups)
    assert manager.get_computed_blocks(make_request("a", range(num_tokens))).num_tokens == 0


# ---- states --------------------------------------------------------------------------------------


def test_a_state_has_one_block_to_read_and_one_to_write():
    manager = make_manager((STATE,), 6)
    a = make_request("a", range(6))
    start(manager, a)
    assert draw(manager, a) == "- 1"
    grow(manager, a, range(6, 12))
    assert draw(manager, a) == "- 1 2*"
    grow(manager, a, [12])
    assert draw(manager, a) == "- - 2* 1"  # block 1, without content, was free again and first in the queue
    assert state(manager.block_pool) == "free: 3 4 5 6 | in use: 1 2*"
    stop(manager, a)


def test_only_the_state_at_a_blocks_end_is_hit():
    manager = make_manager((STATE,), 6)
    a = make_request("a", range(14))
    start(manager, a, 6)
    manager.take_block_copies()
    grow(manager, a, num_new=2)
    manager.take_block_copies()
    grow(manager, a, num_new=6)
    assert draw(manager, a) == "- 1* - 2"
    b = make_request("b", range(14))
    assert start(manager, b) == 8
    assert draw(manager, b) == "- 1*x2 - 3"
    stop(manager, a, b)


def test_a_state_is_not_hit_in_the_step_that_writes_it():
    """A step reads states before it writes any; b would start from a state that is not written yet."""
    manager = make_manager((STATE,), 6)
    a, b = make_request("a", range(8)), make_request("b", range(10))
    start(manager, a)
    before = state(manager.block_pool)
    assert start(manager, b) is None
    assert state(manager.block_pool) == before
    manager.take_block_copies()
    assert start(manager, b) == 8
    stop(manager, a, b)


def test_speculative_tokens_take_no_state():
    """With lookahead slots the state after the last known token was written to the null block."""
    manager = make_manager((FULL, STATE))
    a = make_request("a", range(8))
    start(manager, a, num_lookahead_tokens=5)
    assert draw(manager, a) == "1* 2* 3 4 / - 5*"
    stop(manager, a)


# ---- the encoder's tokens ------------------------------------------------------------------------


def test_cross_attention_blocks_are_taken_once_and_not_shared():
    manager = make_manager((FULL, CrossAttentionSpec(block_size=3)))
    a = make_request("a", range(8), cache_salt="an audio")
    b = make_request("b", range(9), cache_salt="an audio")
    start(manager, a, num_encoder_tokens=7)
    assert draw(manager, a) == "1* 2* / 3 4 5"
    grow(manager, a, [8])
    assert draw(manager, a) == "1* 2* 6 / 3 4 5"
    assert start(manager, b, num_encoder_tokens=7) == 8
    assert draw(manager, b) == "1*x2 2*x2 7 / 8 9 10"
    stop(manager, a, b)


def test_an_encoder_only_model_takes_and_hits_no_blocks():
    """The lookup returned all tokens but the last as cached."""
    manager = make_manager((EncoderOnlyAttentionSpec(block_size=4),))
    a = make_request("a", range(9))
    assert start(manager, a) == 0
    assert draw(manager, a) == ""
    stop(manager, a)


def test_an_encoder_only_group_beside_another_takes_no_blocks():
    manager = make_manager((EncoderOnlyAttentionSpec(block_size=16), FULL))
    a = make_request("a", range(9), cache_salt="a prompt")
    b = make_request("b", range(9), cache_salt="a prompt")
    start(manager, a)
    assert draw(manager, a) == " / 1* 2* 3"
    assert start(manager, b) == 8
    stop(manager, a, b)


def start_with(manager, name, **options):
    """Compute 13 tokens, the same for all requests; return the hit, and whether blocks are cached."""
    request = make_request(name, range(13), **options)
    num_hit = start(manager, request, 12, num_encoder_tokens=20)
    manager.take_block_copies()
    manager.cache_blocks(request, 12)
    is_cached = "*" in draw(manager, request)
    assert grow(manager, request, num_new=1)
    manager.take_block_copies()
    manager.free(request)
    return num_hit, is_cached


def hear(name, offset=0):
    return [MultiModalFeature(name, PlaceholderRange(offset, 20))]


@pytest.mark.parametrize("rules", [None, PrefixRules()], ids=["plain", "rules"])
@pytest.mark.parametrize("decoder", [FULL, WINDOW, STATE])
def test_a_decoder_prefix_is_shared_after_the_same_input_only(decoder, rules):
    """The second audio hit the first one's blocks: the prompt's tokens do not say what the encoder read."""
    manager = make_manager((CrossAttentionSpec(block_size=4), decoder), 60, prefix_rules=rules)
    assert start_with(manager, "unnamed") == (0, False)
    assert start_with(manager, "unnamed too") == (0, False)
    assert start_with(manager, "one", mm_features=hear("one")) == (0, True)
    assert start_with(manager, "two", mm_features=hear("two")) == (0, True)
    assert start_with(manager, "one again", mm_features=hear("one")) == (12, True)
    assert start_with(manager, "three", cache_salt="three") == (0, True)
    assert start_with(manager, "four", cache_salt="four") == (0, True)
    # The first block's hash covers no input that begins behind it.
    assert start_with(manager, "late", mm_features=hear("late", 4)) == (0, False)
    assert start_with(manager, "both", mm_features=hear("one") + hear("late", 8)) == (0, False)
    assert start_with(manager, "a tenant", mm_features=hear("late", 4), cache_salt="tenant") == (0, False)


def test_beside_an_encoder_of_whole_prompts_only_salts_count():
    manager = make_manager((EncoderOnlyAttentionSpec(block_size=4), FULL), 60)
    assert start_with(manager, "unnamed") == (0, False)
    assert start_with(manager, "one", mm_features=hear("one")) == (0, False)
    assert start_with(manager, "two", cache_salt="two") == (0, True)
    assert start_with(manager, "two again", cache_salt="two") == (12, True)


# ---- several groups ------------------------------------------------------------------------------


def test_the_common_hit_is_the_longest_of_all_groups():
    manager = make_manager((FULL, WINDOW), 12)
    a = make_request("a", range(16))
    start(manager, a)
    assert draw(manager, a) == "1* 2* 3* 4* / 5* 6* 7* 8*"
    manager.free(a)
    manager.block_pool.evict_blocks([4])  # full attention now has 12 cached tokens
    assert manager.get_computed_blocks(make_request("b", range(17))).num_tokens == 12
    manager.block_pool.evict_blocks([7])  # the window can continue after 8 or 16
    b = make_request("b", range(11))
    assert start(manager, b) == 8
    assert draw(manager, b) == "1* 2* 9 / - 6* 10"
    stop(manager, b)


def test_hits_are_multiples_of_the_largest_block_size():
    groups = (FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=5))
    manager = make_manager(groups, 16)
    a = make_request("a", range(20))
    start(manager, a)
    # In the window group, only the block before each multiple of 8 can serve a hit.
    assert draw(manager, a) == "1* 2* 3 / 4 5* 6 7* 8"
    b = make_request("b", range(14))
    assert start(manager, b) == 8
    assert draw(manager, b) == "1*x2 9 / - 5*x2 10 11"
    stop(manager, a, b)


def test_groups_share_hashes_finer_than_their_blocks():
    groups = (FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=3))
    manager = make_manager(groups, 16, hash_block_size=2)
    a, b = make_request("a", range(17), 2), make_request("b", range(17), 2)
    start(manager, a)
    assert start(manager, b) == 16
    assert draw(manager, b) == "1*x2 2*x2 9 / - - - 7*x2 10"
    stop(manager, a, b)


def test_full_window_and_state_over_one_pool():
    manager = make_manager((FULL, WINDOW, STATE), 20)
    a = make_request("a", range(12))
    start(manager, a, 8)
    assert draw(manager, a) == "1* 2* / 3* 4* / - 5*"
    manager.take_block_copies()
    grow(manager, a)
    assert draw(manager, a) == "1* 2* 6* / - 4* 7* / - 5* 8*"
    manager.take_block_copies()
    b = make_request("b", range(10))
    assert start(manager, b) == 8
    assert draw(manager, b) == "1*x2 2*x2 9 / - 4*x2 10 / - 5*x2 11"
    stop(manager, a, b)


def test_groups_are_freed_in_order_each_tail_first():
    manager = make_manager((FULL, WINDOW), 6)
    a = make_request("a", range(8))
    start(manager, a)
    manager.free(a)
    assert state(manager.block_pool) == "free: 5 6 2* 1* 4* 3*"


def test_a_block_size_not_divisible_by_hashes_is_refused():
    with pytest.raises(InvalidArgumentError, match="block_size 6 is not a multiple"):
        make_manager((FULL, SlidingWindowSpec(block_size=6, sliding_window=4)))
