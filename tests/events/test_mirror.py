"""Lookups of a mirror, and inconsistent events."""

import threading

import msgspec
import pytest

from kv_pool import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    InvalidArgumentError,
    InvalidTypeError,
)
from kv_pool.core.kv_events import BlockReported
from kv_pool.events.batch import decode_batch, decode_lazily
from kv_pool.events.mirror import PrefixMirror


def stored(*hashes, parent=None, tokens=None, block_size=4, medium="GPU", lora=None, **more):
    """Return a store of blocks; by default tokens are derived from the block number."""
    if tokens is None:
        tokens = [number for one in hashes for number in [abs(hash(one)) % 1000] * block_size]
    return BlockStored(list(hashes), parent, tokens, block_size, None, medium, lora, **more)


def removed(*hashes, medium="GPU", **more):
    return BlockRemoved(list(hashes), medium, **more)


def make_mirror(**publishers):
    mirror = PrefixMirror(learns_tokens=True)
    for name, events in publishers.items():
        mirror.apply(name, events)
    return mirror


def wide(token):
    """Return a token in msgpack's longest form."""
    return b"\xcf" + token.to_bytes(8, "big")


# ---- prefixes by hash ----------------------------------------------------------------------------


def test_prefix_ends_at_the_first_block_not_held():
    mirror = make_mirror(a=[stored(1, 2, 3, 4)], b=[stored(1, 2)], c=[stored(2, 3)], d=[stored(1), stored(3)])
    assert mirror.find_prefix([1, 2, 3, 9]) == {"a": 3, "b": 2, "d": 1}
    assert mirror.find_best([1, 2, 3]) == ("a", 3)


@pytest.mark.parametrize("hashes", [[], [9], [9, 1]])
def test_prefix_without_first_block_has_no_holders(hashes):
    mirror = make_mirror(a=[stored(1)])
    assert mirror.find_prefix(hashes) == {}
    assert mirror.find_best(hashes) is None


def test_of_equal_publishers_the_first_registered_is_best():
    mirror = make_mirror(z=[stored(1)], a=[stored(1)])
    assert mirror.find_best([1]) == ("z", 1)


def test_hashes_may_be_signed_or_bytes_on_either_side():
    digest = bytes(24) + b"\xff" * 7 + b"\x05"
    mirror = make_mirror(unsigned=[stored(2**64 - 251)], signed=[stored(-251)], long=[stored(digest)])
    everyone = {"unsigned": 1, "signed": 1, "long": 1}
    assert mirror.find_prefix([2**64 - 251]) == everyone
    assert mirror.find_prefix([-251]) == everyone
    assert mirror.find_prefix([digest]) == everyone
    mirror.apply("unsigned", [removed(digest)])
    assert mirror.find_prefix([digest]) == {"signed": 1, "long": 1}


@pytest.mark.parametrize("wrong", ["1", None, ("a",)])
def test_invalid_hash_is_rejected(wrong):
    mirror = make_mirror(a=[stored(1)])
    with pytest.raises(InvalidTypeError, match="hashes are ints or bytes"):
        mirror.find_prefix([wrong])


def test_invalid_event_is_rejected_after_earlier_ones_applied():
    mirror = PrefixMirror()
    with pytest.raises(InvalidTypeError, match="a str is not an event"):
        mirror.apply("a", [stored(1), "BlockStored", stored(2)])
    assert mirror.get_blocks("a") == {(0, "GPU", 1)}


def test_prefix_counts_are_right_for_many_publishers():
    mirror = PrefixMirror()
    for number in range(100):
        mirror.apply(f"p{number}", [stored(*range(number + 1))])
    assert mirror.find_prefix(range(100)) == {f"p{number}": number + 1 for number in range(100)}


# ---- groups and media ----------------------------------------------------------------------------


def test_media_are_compared_in_upper_case():
    mirror = make_mirror(a=[stored(1, 2), stored(3, parent=2, medium="CPU"), stored(1, medium="cpu")])
    assert mirror.find_prefix([1, 2, 3], medium="cpu") == {"a": 1}
    assert mirror.get_blocks("a") == {(0, "GPU", 1), (0, "GPU", 2), (0, "CPU", 3), (0, "CPU", 1)}


def test_missing_medium_is_gpu_and_missing_group_is_0():
    mirror = make_mirror(a=[stored(1, medium=None), stored(2, group_idx=0)])
    assert mirror.find_prefix([1, 2], group=0, medium="GPU") == {"a": 2}
    mirror.apply("a", [removed(2, medium=None), removed(1, group_idx=0)])
    assert mirror.get_blocks("a") == set()


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_in_any_group_is_searched(kind):
    mirror = make_mirror(
        a=[
            stored(1, group_idx=0, kv_cache_spec_kind="sliding_window"),
            stored(1, 2, group_idx=1, kv_cache_spec_kind=kind),
        ]
    )
    assert mirror.find_prefix([1, 2]) == {"a": 2}
    assert mirror.find_prefix([1, 2], group=1) == {"a": 2}
    assert mirror.find_prefix([1, 2], group=0) == {}


def test_group_is_searched_once_its_kind_is_known():
    mirror = make_mirror(a=[stored(1, tokens=[1, 2, 3, 4], group_idx=3)])
    assert mirror.find_prefix([1]) == mirror.find_prefix_of_tokens([1, 2, 3, 4]) == {}
    mirror.apply("a", [stored(2, parent=1, group_idx=3, kv_cache_spec_kind="full_attention")])
    assert mirror.find_prefix([1, 2]) == {"a": 2}
    assert mirror.find_prefix_of_tokens([1, 2, 3, 4]) == {"a": 4}
    mirror.apply("a", [stored(3, parent=2, group_idx=3, kv_cache_spec_kind="sliding_window")])
    assert mirror.find_prefix([1, 2]) == mirror.find_prefix_of_tokens([1, 2, 3, 4]) == {}
    assert mirror.count_blocks("a") == 3


def test_events_about_remote_blocks_are_ignored():
    mirror = make_mirror(a=[stored(1, locality="LOCAL"), stored(2, locality="REMOTE")])
    mirror.apply("a", [removed(1, locality="REMOTE")])
    assert mirror.get_blocks("a") == {(0, "GPU", 1)}
    assert mirror.get_counts("a").num_remote == 2


# ---- copies, clears, publishers ------------------------------------------------------------------


def test_copies_are_counted_if_the_publisher_announces_each():
    mirror = PrefixMirror()
    mirror.add_publisher("first and last", counts_copies=False)
    for name in ("each copy", "first and last"):
        mirror.apply(name, [stored(1), stored(1), stored(1), removed(1)])
    assert mirror.find_prefix([1]) == {"each copy": 1}
    mirror.apply("each copy", [removed(1)])
    assert mirror.find_prefix([1]) == {"each copy": 1}
    mirror.apply("each copy", [removed(1), removed(1)])
    assert mirror.find_prefix([1]) == {}
    counts = mirror.get_counts("each copy")
    assert (counts.num_stored, counts.num_stored_again, counts.num_removed) == (1, 2, 1)
    assert counts.num_removed_unknown == 1


def test_reported_hit_is_not_a_copy():
    mirror = PrefixMirror()
    mirror.apply("a", [stored(1), BlockReported([1], None, [1] * 4, 4, None, "GPU", None), removed(1)])
    assert mirror.get_blocks("a") == set()


def test_publisher_can_be_cleared_and_removed():
    mirror = make_mirror(a=[stored(1)], b=[stored(1)])
    mirror.clear_publisher("a")
    assert mirror.find_prefix([1]) == {"b": 1}
    assert mirror.publisher_ids == ["a", "b"]
    mirror.remove_publisher("b")
    mirror.remove_publisher("nobody")
    mirror.clear_publisher("nobody")
    assert mirror.publisher_ids == ["a"]
    mirror.apply("c", [stored(1)])  # takes the bit of b
    assert mirror.find_prefix([1]) == {"c": 1}
    assert mirror.get_blocks("b") == set()
    assert mirror.count_blocks("b") == 0
    with pytest.raises(InvalidArgumentError, match="unknown publisher 'b'"):
        mirror.get_counts("b")


# ---- bounds on one publisher ---------------------------------------------------------------------


def test_publisher_with_8000_media_does_not_slow_lookups():
    """Each medium used to be a permanent table that every lookup scanned: 6 s per lookup."""
    mirror = make_mirror(honest=[stored(1, 2)], hostile=[stored(1, medium=f"M{n}") for n in range(8000)])
    assert len(mirror._tables.tables) <= 33
    assert mirror.get_counts("hostile").num_refused == 8000 - 32
    assert mirror.count_blocks("hostile") == 32
    assert mirror.find_prefix([1, 2]) == {"honest": 2, "hostile": 1}
    mirror.remove_publisher("hostile")
    assert [*mirror._tables.tables] == [(0, "GPU")]
    assert mirror.find_prefix([1, 2]) == {"honest": 2}


def test_empty_groups_and_media_do_not_count_towards_the_bound():
    mirror = PrefixMirror(max_places=2)
    for number in range(100):
        mirror.apply("a", [stored(1, medium=f"M{number}"), removed(1, medium=f"M{number}")])
    mirror.apply("a", [stored(1, group_idx=number, kv_cache_spec_kind="mamba") for number in range(100)])
    assert mirror.get_counts("a").num_refused == 98
    mirror.apply("a", [AllBlocksCleared(), stored(5, medium="CPU"), stored(6)])
    assert mirror.get_blocks("a") == {(0, "CPU", 5), (0, "GPU", 6)}
    assert mirror._tables.tables.keys() == {(0, "CPU"), (0, "GPU")}


def test_medium_with_a_long_name_is_rejected():
    mirror = make_mirror(a=[stored(1, medium="M" * 65), stored(2, medium="M" * 64)])
    assert mirror.get_blocks("a") == {(0, "M" * 64, 2)}
    assert mirror.get_counts("a").num_refused == 1


def test_publisher_with_8000_block_sizes_does_not_slow_lookups():
    """Each block size used to add a permanent pass over the prompt to every token lookup."""
    mirror = make_mirror(
        honest=[stored(1, 2, tokens=range(100, 108))],
        hostile=[stored(n, tokens=[1] * n, block_size=n) for n in range(1, 8001) if n != 4],
    )
    assert len(mirror._tables.num_by_block_size) == 9
    assert mirror.get_counts("hostile").num_refused_sizes == 7999 - 8
    assert mirror.count_blocks("hostile") == 7999
    assert mirror.find_prefix_of_tokens(range(100, 108)) == {"honest": 8}
    mirror.clear_publisher("hostile")
    assert list(mirror._tables.num_by_block_size) == [4]
    mirror.apply("hostile", [stored(1, tokens=[9] * 16, block_size=16)])
    assert mirror.find_prefix_of_tokens([9] * 16) == {"hostile": 16}
    mirror.remove_publisher("hostile")
    assert list(mirror._tables.num_by_block_size) == [4]


@pytest.mark.parametrize("learns_tokens", [False, True])
def test_number_of_blocks_per_publisher_is_bounded(learns_tokens):
    """Memory used to grow without bound."""
    mirror = PrefixMirror(learns_tokens, max_blocks=5)
    mirror.apply("honest", [stored(1, 2, 3)])
    mirror.apply("hostile", [stored(*range(1, 1000)), stored(7000, medium="CPU")])
    assert mirror.get_blocks("hostile") == {(0, "GPU", block_hash) for block_hash in range(1, 6)}
    assert mirror.get_counts("hostile").num_refused == 994 + 1
    assert mirror.find_prefix(range(1, 1000)) == {"honest": 3, "hostile": 5}
    mirror.apply("hostile", [removed(4, 5, 6), stored(8), stored(9, 10, medium="CPU")])
    assert mirror.get_blocks("hostile") == {(0, "GPU", n) for n in (1, 2, 3, 8)} | {(0, "CPU", 9)}
    assert mirror.get_counts("hostile").num_refused == 996
    mirror.apply("hostile", [AllBlocksCleared(), stored(*range(20, 25))])
    assert mirror.count_blocks("hostile") == 5
    assert mirror.get_counts("hostile").num_refused == 996
    assert mirror.get_counts("honest").num_refused == 0


@pytest.mark.parametrize("options", [{"max_places": 0}, {"max_block_sizes": 0}, {"max_blocks": 0}])
def test_bounds_below_one_are_rejected(options):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        PrefixMirror(**options)


# ---- prefixes by tokens --------------------------------------------------------------------------


def test_tokens_are_found_with_any_hash_algorithm():
    prompt = list(range(100, 112))
    mirror = make_mirror(
        a=[stored(7, 8, 9, tokens=prompt)],
        b=[stored(b"x" * 32, tokens=prompt[:4]), stored(b"y" * 32, parent=b"x" * 32, tokens=[1, 2, 3, 4])],
        wide=[stored(5, tokens=prompt[:8], block_size=8)],
    )
    assert mirror.find_prefix_of_tokens(prompt) == {"a": 12, "b": 4, "wide": 8}
    assert mirror.find_prefix_of_tokens(prompt[:11]) == {"a": 8, "b": 4, "wide": 8}
    assert mirror.find_prefix_of_tokens(prompt[1:]) == {}
    mirror.apply("a", [removed(9), removed(8)])
    assert mirror.find_prefix_of_tokens(prompt) == {"a": 4, "b": 4, "wide": 8}


def test_adapter_and_extra_keys_distinguish_prompts():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    mirror = make_mirror(
        plain=[stored(1, 2, tokens=prompt, extra_keys=[None, None])],
        lora=[stored(3, 4, tokens=prompt, lora="sql", extra_keys=[("sql",), ("sql",)])],
        salted=[stored(5, 6, tokens=prompt, extra_keys=[("tenant",), None])],
        image=[stored(7, 8, tokens=prompt, extra_keys=[None, [["cat.png", -2]]])],
    )
    assert mirror.find_prefix_of_tokens(prompt) == {"plain": 8, "image": 4}
    assert mirror.find_prefix_of_tokens(prompt, "sql") == {"lora": 8}
    assert mirror.find_prefix_of_tokens(prompt, "sql", [("sql",), ("sql",)]) == {"lora": 8}
    assert mirror.find_prefix_of_tokens(prompt, extra_keys=[("tenant",)]) == {"salted": 8}
    image = [None, [("cat.png", -2)]]
    assert mirror.find_prefix_of_tokens(prompt, extra_keys=image) == {"image": 8, "plain": 4}


@pytest.mark.parametrize("form", ["map", "array"])
def test_adapter_with_a_number_only_is_not_found_by_tokens(form):
    """Older engines send `lora_id` and no `lora_name`; 12 of 12 tokens used to be found."""
    mirror = PrefixMirror(learns_tokens=True)
    stores = [
        {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": list(range(8)), "lora_id": 3},
        {"block_hashes": [3], "parent_block_hash": 2, "token_ids": [8, 9, 10, 11], "lora_id": 3},
        {"block_hashes": [9], "parent_block_hash": None, "token_ids": [5, 5, 5, 5], "lora_id": 0},
    ]
    raw = [{"type": "BlockStored", "block_size": 4, "medium": "GPU", **one} for one in stores]
    if form == "array":
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        raw = [[one[name] for name in names] for one in raw]
    mirror.apply("engine", decode_batch(msgspec.msgpack.encode([1.0, raw, 0])).events)
    assert mirror.find_prefix([1, 2, 3]) == {"engine": 3}
    assert mirror.find_prefix_of_tokens(list(range(12))) == {}
    assert mirror.find_prefix_of_tokens([5, 5, 5, 5]) == {"engine": 4}


def test_blocks_without_known_tokens_are_found_by_hash_only():
    mirror = make_mirror(
        a=[
            stored(2, parent=1, tokens=[5, 6, 7, 8]),
            stored(8, 9, tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),  # a hole in the span
            stored(10, tokens=[1, 2, 3, -1]),  # a placeholder
        ]
    )
    assert mirror.find_prefix([2]) == {"a": 1}
    assert mirror.find_prefix([8, 9]) == {"a": 2}
    assert mirror.find_prefix_of_tokens([1, 2, 3, 4, 5, 6, 7, 8]) == {}
    assert mirror.get_counts("a").num_unknown_parents == 1
    # Stored again after a known parent, the block can be found by tokens.
    mirror.apply("a", [stored(1, 2, tokens=[1, 2, 3, 4, 5, 6, 7, 8])])
    assert mirror.find_prefix_of_tokens([1, 2, 3, 4, 5, 6, 7, 8]) == {"a": 8}
    mirror.apply("a", [removed(2)])  # one of two copies
    assert mirror.find_prefix_of_tokens([1, 2, 3, 4, 5, 6, 7, 8]) == {"a": 8}
    mirror.apply("a", [removed(2)])
    assert mirror.find_prefix_of_tokens([1, 2, 3, 4, 5, 6, 7, 8]) == {"a": 4}


def test_block_offloaded_without_tokens_keeps_its_token_key():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    mirror = make_mirror(a=[stored(1, 2, tokens=prompt)])
    mirror.apply("a", [stored(1, 2, tokens=[], block_size=0, medium="CPU"), removed(1), removed(2)])
    assert mirror.find_prefix_of_tokens(prompt) == {"a": 8}
    mirror.apply("a", [stored(3, parent=2, tokens=[9, 9, 9, 9])])  # the parent is in the other medium
    assert mirror.find_prefix_of_tokens([*prompt, 9, 9, 9, 9]) == {"a": 12}


def test_prompt_with_two_hashes_is_held_until_both_are_removed():
    prompt = [1, 2, 3, 4]
    ahead = [stored(10 + token, tokens=prompt, lookahead_token_ids=[[token]]) for token in (5, 6)]
    mirror = make_mirror(a=[*ahead, removed(15)])
    assert mirror.find_prefix_of_tokens(prompt) == {"a": 4}
    mirror.apply("a", [removed(16)])
    assert mirror.find_prefix_of_tokens(prompt) == {}


@pytest.mark.parametrize(
    "tokens", [[0, 127, 128, 255], [256, 65535, 65536, 2**32 - 1], [2**32, 2**64 - 1, 1, 2]]
)
@pytest.mark.parametrize("encode_token", [int, wide], ids=["shortest", "wide"])
def test_tokens_are_found_in_any_encoding(tokens, encode_token):
    """A publisher may encode an integer in more bytes than needed; the key must not depend on it."""
    event = msgspec.structs.asdict(stored(7, tokens=tokens)) | {"type": "BlockStored"}
    packed = [msgspec.Raw(one) if isinstance(one, bytes) else one for one in map(encode_token, tokens)]
    payload = msgspec.msgpack.encode([1.5, [event | {"token_ids": packed}], 0])
    mirror = PrefixMirror(learns_tokens=True)
    mirror.apply("a", decode_lazily(payload).unread_events)
    assert mirror.find_prefix_of_tokens(tokens) == {"a": 4}
    assert decode_lazily(payload).events[0].token_ids == tokens


def test_token_lookup_requires_learns_tokens():
    with pytest.raises(InvalidArgumentError, match="learns_tokens=True"):
        PrefixMirror().find_prefix_of_tokens([1])


def test_invalid_tokens_are_rejected():
    mirror = make_mirror(a=[stored(1)])
    with pytest.raises(InvalidArgumentError, match="token 3 is -1"):
        mirror.find_prefix_of_tokens([1, 2, 3, -1])


def test_lookups_run_while_other_threads_apply_events():
    mirror = PrefixMirror(learns_tokens=True)
    prompt = list(range(40))
    mirror.apply("still", [stored(*range(1, 11), tokens=prompt)])
    failures = []
    done = threading.Event()

    def change(name):
        for round_number in range(150):
            mirror.apply(name, [stored(*range(1, 11), tokens=prompt), stored(round_number + 100)])
            mirror.apply(name, [removed(*range(10, 0, -1))])
            if round_number % 10 == 0:
                mirror.remove_publisher(name)

    def look_up():
        while not done.is_set():
            for found, all_of_it in (
                (mirror.find_prefix(range(1, 11)), 10),
                (mirror.find_prefix_of_tokens(prompt), 40),
            ):
                if found.get("still") != all_of_it or not all(found.values()):
                    failures.append(found)

    looking = threading.Thread(target=look_up)
    changing = [threading.Thread(target=change, args=(f"p{number}",)) for number in range(3)]
    looking.start()
    for thread in changing:
        thread.start()
    for thread in changing:
        thread.join()
    done.set()
    looking.join()
    assert failures == []
    assert mirror.get_blocks("still") == {(0, "GPU", one) for one in range(1, 11)}
