"""Bytes derived from a block's name."""

from kv_pool.lab.live.live_replay import BlockContents


def test_each_name_has_its_own_bytes_and_wrong_bytes_are_found():
    contents = BlockContents(5, 100)
    contents.write([1, 2, 3], [b"a", b"b", b"a"])
    storage = contents.storage
    assert storage.read_block(1) == storage.read_block(3) != storage.read_block(2)
    assert contents.find_wrong([1, 2, 3], [b"a", b"b", b"a"]) == []
    assert contents.find_wrong([1, 2, 4], [b"a", b"a", b"a"]) == [2, 4]
    storage.apply_moves([(2, 4)])
    assert contents.find_wrong([4], [b"b"]) == []
    data = bytearray(storage.read_block(1))
    data[-1] ^= 1
    storage.write_block(1, data)
    assert contents.find_wrong([1, 3], [b"a", b"a"]) == [1]
