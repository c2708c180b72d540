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


def test_a_window_may_begin_anywhere_in_a_block():
    manager = make_manager((SlidingWindowSpec(block_size=4, sliding_window=6),), 20, max_in_flight_tokens=1)
    assert manager.count_max_blocks(40) == 3  # such as for tokens 3 to 8


# ---- chunks --------------------------------------------------------------------------------------


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


def test_speculative_tokens_take_no_state():
    """With lookahead slots the state after the last known token was written to the null block."""
    manager = make_manager((FULL, STATE))
    a = make_request("a", range(8))
    start(manager, a, num_lookahead_tokens=5)
    assert draw(manager, a) == "1* 2* 3 4 / - 5*"
    stop(manager, a)


# ---- the encoder's tokens ------------------------------------------------------------------------


def test_an_encoder_only_model_takes_and_hits_no_blocks():
    """The lookup returned all tokens but the last as cached."""
    manager = make_manager((EncoderOnlyAttentionSpec(block_size=4),))
    a = make_request("a", range(9))
    assert start(manager, a) == 0
    assert draw(manager, a) == ""
    stop(manager, a)


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


def test_a_block_size_not_divisible_by_hashes_is_refused():
    with pytest.raises(InvalidArgumentError, match="block_size 6 is not a multiple"):
        make_manager((FULL, SlidingWindowSpec(block_size=6, sliding_window=4)))
