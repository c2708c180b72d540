"""Sessions whose last tokens are withdrawn: no hash and no cached block may cover them afterwards."""

import pytest
from manager.table_drawing import draw, grow, make_manager, make_request, start, stop

from kv_pool import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    InvalidArgumentError,
    MambaSpec,
    PrefixRules,
    Request,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=4)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5)


def hits(manager, tokens):
    return manager.get_computed_blocks(make_request("look-up", tokens)).num_tokens


def test_a_withdrawn_token_takes_its_hash_along():
    """The hash of 1 2 3 99 stayed, and the block of 1 2 3 50 was hit by it."""
    manager = make_manager((FULL,))
    session = make_request("session", [1, 2, 3])
    start(manager, session)
    session.append_output_token_ids([99])
    session.truncate(3)
    assert grow(manager, session, [50, 51])
    assert (hits(manager, [1, 2, 3, 99, 7]), hits(manager, [1, 2, 3, 50, 7])) == (0, 4)
    assert session.block_hashes == make_request("twin", [1, 2, 3, 50, 51]).block_hashes
    stop(manager, session)


@pytest.mark.parametrize("num_left", range(1, 11))
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_the_hashes_left_are_those_of_the_tokens_left(num_left, num_ahead):
    hasher = BlockHasher("sha256", "s", 4, num_ahead)
    request = Request("r", range(8), hasher)
    request.append_output_token_ids([8, 9])
    request.truncate(num_left)
    twin = Request("twin", range(num_left), hasher)
    assert (request.block_hashes, request.all_token_ids) == (twin.block_hashes, twin.all_token_ids)
    assert request.num_prompt_tokens == min(8, num_left)


def test_tokens_deleted_without_their_hashes_are_refused():
    hasher = BlockHasher("sha256", "s", 4)
    request = Request("r", [1, 2, 3, 99], hasher)
    del request.all_token_ids[3:]
    for call in (lambda: request.append_output_token_ids([50]), lambda: hasher.hash_request(request)):
        with pytest.raises(InvalidArgumentError, match=r"has 3 tokens but hashes for 4"):
            call()
    assert request.all_token_ids == [1, 2, 3]


def test_truncate_refuses_impossible_numbers_of_tokens():
    manager = make_manager((FULL,))
    request = make_request("r", range(6))
    start(manager, request)
    request.append_output_token_ids([6])
    for num_left in (0, -1, 8):
        for call in (request.truncate, lambda number: manager.truncate(request, number)):
            with pytest.raises(
                InvalidArgumentError, match=f"has 7 tokens; {num_left} of them cannot be left"
            ):
                call(num_left)
    with pytest.raises(InvalidArgumentError, match=r"has 6 computed tokens.*KVCacheManager.truncate"):
        request.truncate(5)
    assert (request.num_tokens, request.num_computed_tokens, draw(manager, request)) == (7, 6, "1* 2")


def test_a_shared_block_cached_late_is_not_hit_after_a_write():
    manager = make_manager((FULL,))
    session, child = make_request("session", range(8)), make_request("child", range(8))
    start(manager, session, delay_cache_blocks=True)
    child.num_computed_tokens = 8
    manager.fork(session, child)
    manager.truncate(session, 6)
    manager.cache_blocks(child, 8)
    manager.free(child)
    assert grow(manager, session, [50, 51])
    assert (hits(manager, range(9)), hits(manager, [0, 1, 2, 3, 4, 5, 50, 51, 7])) == (4, 8)
    stop(manager, session)


@pytest.mark.parametrize(
    ("spec", "num_left"),
    [
        (MambaSpec(block_size=4), 11),
        (MambaSpec(block_size=4), 8),
        (WINDOW, 6),
        (SlidingWindowSpec(block_size=4, sliding_window=1), 7),
        (ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8), 7),
    ],
)
def test_what_the_next_token_would_read_must_be_there(spec, num_left):
    manager = make_manager((FULL, spec))
    session = make_request("session", range(8))
    start(manager, session)
    for token in (8, 9, 10, 11):
        assert grow(manager, session, [token])
        manager.take_block_copies()
    before = draw(manager, session)
    with pytest.raises(InvalidArgumentError, match=f"cannot go back from 12 to {num_left} computed tokens"):
        manager.truncate(session, num_left)
    assert (draw(manager, session), session.num_tokens, session.num_computed_tokens) == (before, 12, 12)
    stop(manager, session)


def test_a_partial_block_loses_the_hash_of_withdrawn_tokens():
    """Blocks of 8 tokens, hashes of 4: a prompt's end within a block is cached, too."""
    groups = (FullAttentionSpec(block_size=8), MambaSpec(block_size=8))
    manager = make_manager(groups, prefix_rules=PrefixRules())
    session = make_request("session", range(12))
    assert manager.allocate_slots(session, 12)
    session.num_computed_tokens = 12
    manager.take_block_copies()
    with pytest.raises(InvalidArgumentError, match="cannot go back"):
        manager.truncate(session, 10)
    manager = make_manager((FullAttentionSpec(block_size=8), FULL), prefix_rules=PrefixRules())
    session = make_request("session", range(13))
    start(manager, session)
    assert hits(manager, range(13)) in (8, 12)
    manager.truncate(session, 10)
    assert grow(manager, session, [50, 51, 52])
    assert hits(manager, range(13)) == 8
    stop(manager, session)


def test_writing_other_tokens_to_a_cached_block_is_refused():
    """The count was set back by hand: the block of 1 2 3 99 stayed cached and got other tokens."""
    manager = make_manager((FULL,))
    session = make_request("session", [1, 2, 3, 99])
    start(manager, session)
    session.num_computed_tokens = 3
    session.truncate(3)
    session.append_output_token_ids([50, 51])
    with pytest.raises(InvalidArgumentError, match=r"block 1 is cached for tokens.*truncate"):
        manager.allocate_slots(session, 2)
    session.num_computed_tokens = 4
    manager.free(session)
