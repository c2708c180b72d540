import random

import pytest

from kv_pool import BlockHashToBlockMap, CorruptedPoolError, KVCacheBlock


def test_an_empty_map_is_falsy_and_finds_nothing():
    empty = BlockHashToBlockMap()
    assert not empty
    assert len(empty) == 0
    assert empty.get_one_block(b"a") is None
    assert empty.pop(b"a", 1) is None
    assert not empty.contain(b"a", 1)


def test_one_block_is_stored_bare_and_two_in_a_dict():
    one, two = KVCacheBlock(1), KVCacheBlock(2)
    found = BlockHashToBlockMap()
    found.insert(b"a", one)
    assert found._cache == {b"a": one}
    found.insert(b"a", two)
    assert found._cache == {b"a": {1: one, 2: two}}
    assert len(found) == 1
    assert found.pop(b"a", 1) is one
    assert found._cache == {b"a": {2: two}}
    assert found.pop(b"a", 2) is two
    assert found._cache == {}


def test_a_foreign_value_is_detected():
    found = BlockHashToBlockMap()
    found._cache[b"a"] = "not a block"
    for call in (
        lambda: found.get_one_block(b"a"),
        lambda: found.insert(b"a", KVCacheBlock(1)),
        lambda: found.pop(b"a", 1),
        lambda: found.contain(b"a", 1),
    ):
        with pytest.raises(CorruptedPoolError, match="holds a str"):
            call()


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_agree_with_a_dict_of_lists(seed):
    rng = random.Random(seed)
    found, model = BlockHashToBlockMap(), {}
    made = [KVCacheBlock(block_id) for block_id in range(6)]
    for _ in range(300):
        key, block = rng.choice([b"a", b"b", b"c"]), rng.choice(made)
        if rng.random() < 0.5:
            found.insert(key, block)
            if block not in model.setdefault(key, []):
                model[key].append(block)
        else:
            held = block in model.get(key, [])
            assert found.pop(key, block.block_id) is (block if held else None)
            if held:
                model[key].remove(block)
                if not model[key]:
                    del model[key]
        assert len(found) == len(model)
        for key in (b"a", b"b", b"c"):
            assert found.get_one_block(key) is (model[key][0] if key in model else None)
            assert [b for b in made if found.contain(key, b.block_id)] == sorted(
                model.get(key, []), key=lambda b: b.block_id
            )
