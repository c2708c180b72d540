"""Contract tests for all tiers: host memory and disk, raw and encoded, and without bytes."""

import random

import numpy as np
import pytest
from tiers.made_tiers import KINDS, Device, make_key, make_tier

from kv_pool import BlockHasher, InvalidArgumentError, Request
from kv_pool.storage import KVStorage
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers import invariants
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.formats import make_format
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier, TierStack
from kv_pool.tiers.tier_prefixes import GroupKeys, TierPrefixes

A, B, C, D, E = (make_key(name) for name in "ABCDE")


class Handled:
    """A tier and a device; blocks are put from and read into the device's blocks."""

    def __init__(self, kind, folder, capacity):
        self.device = Device()
        self.tier = Tier(capacity) if kind == "index" else make_tier(kind, self.device, folder, capacity)

    def put(self, *keys):
        if not self.tier.has_bytes:
            return self.tier.put(keys)
        for block_id, key in enumerate(keys):
            self.device.write(block_id, key)
        return self.tier.put(keys, self.device.storage, range(len(keys)))

    def read(self, *keys):
        """Read the keys and verify their bytes. Return the keys that were read."""
        read = self.tier.read(keys)
        if self.tier.has_bytes and read.keys:
            places = list(enumerate(read.block_ids))
            read.storage.copy_to(self.device.storage, [(block_id, 8 + target) for target, block_id in places])
            for place, key in enumerate(read.keys):
                assert self.device.holds(8 + place, key), "the bytes differ from those put"
        return list(read.keys)


@pytest.fixture(params=["index", *KINDS])
def handled(request, tmp_path):
    handled = Handled(request.param, tmp_path / "tier", 4)
    yield handled
    handled.tier.close()


def test_statistics_count_blocks(handled):
    handled.put(A, B, C)
    handled.read(A, B)
    handled.tier.remove([A])
    told = handled.tier.get_statistics()
    assert (told.capacity, told.num_blocks, told.num_stored, told.num_read, told.num_removed) == (
        4,
        2,
        3,
        2,
        1,
    )
    assert (told.num_write_errors, told.num_read_errors) == (0, 0)
    assert bool(told.block_bytes) is handled.tier.has_bytes


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_capacity_must_be_a_positive_integer(capacity):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        Tier(capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_tier_with_bytes_rejects_keys_without_blocks(kind, tmp_path):
    tier = make_tier(kind, Device(), tmp_path, 4)
    with pytest.raises(InvalidArgumentError, match="0 blocks for 1 keys"):
        tier.put([A])
    assert len(tier) == 0


class Interrupted(list):
    """Keys whose iteration is interrupted after the first one."""

    def __iter__(self):
        yield self[0]
        raise KeyboardInterrupt


def test_interrupted_put_gives_no_slot_to_two_keys():
    tier = Tier(5)
    tier.put([A, B])
    tier.remove([A])
    with pytest.raises(KeyboardInterrupt):
        tier.put(Interrupted([A, C]))
    tier.put([D])
    assert {A, B, D} <= set(tier.list_keys())
    slots = list(tier._slot_of.values())
    assert len(set(slots)) == len(slots)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["index", *KINDS])
def test_tier_matches_a_list_model(kind, seed, tmp_path):
    """The model is a list of keys, the most recently used last."""
    rng = random.Random(seed)
    handled = Handled(kind, tmp_path / "tier", 6)
    tier, model, held = handled.tier, [], []
    stack = TierStack([tier])
    names = [make_key(name) for name in range(14)]
    for _ in range(150):
        some = rng.sample(names, rng.randint(1, 5))
        action = rng.choice(("put", "put", "put", "touch", "read", "remove", "hold", "release", "clear"))
        if action == "put":
            new = tier.touch(some)
            assert new == [key for key in some if key not in model]
            known = [key for key in some if key in model]
            model = [key for key in model if key not in known] + known
            out = tier.list_next_evicted(len(model) + len(new) - 6)
            assert out == [key for key in model if key not in held][: max(0, len(model) + len(new) - 6)]
            tier.remove(out)
            model = [key for key in model if key not in out]
            new = new[: 6 - len(model)]
            assert handled.put(*new) == new
            model += new
        elif action == "touch":
            tier.touch(some)
            known = [key for key in some if key in model]
            model = [key for key in model if key not in known] + known
        elif action == "read":
            known = [key for key in some if key in model]
            assert handled.read(*known) == known
        elif action == "remove":
            known = [key for key in some if key in model]
            assert rng.choice((tier.remove, tier.forget))(some) == known
            model = [key for key in model if key not in known]
        elif action == "hold" and len(held) < 4:
            held += some[:2]
            stack.hold(some[:2])
            known = [key for key in some[:2] if key in model]
            model = [key for key in model if key not in known] + known
        elif action == "release" and held:
            stack.release([held[0]])
            held = held[1:]
        elif action == "clear" and rng.random() < 0.1:
            tier.clear()
            model = []
        assert tier.list_keys() == model
        invariants.check_tier(tier)
    tier.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("name", ["raw", "int8", "low_rank:0.5"])
def test_stored_blocks_are_read_as_their_format_decodes_them(kind, name, tmp_path):
    storage = KVStorage.allocate(6, block_size=4, num_layers=2, num_kv_heads=2, head_size=8)
    rng = np.random.default_rng(0)
    for tensor in storage.tensors:
        tensor[...] = rng.standard_normal(tensor.shape)
    block_format = make_format(name, storage)
    rows = np.stack([np.frombuffer(storage.read_block(block_id), np.uint8) for block_id in range(3)])
    expected = block_format.decode(block_format.encode(rows))
    if kind == "host":
        tier = HostTier(4, storage, block_format)
    else:
        tier = DiskTier(tmp_path, 4, BlockLayout.describe(storage, 4), block_format)
    tier.put([A, B, C], storage, [0, 1, 2])
    read = tier.read([A, B, C])
    read.storage.copy_to(storage, list(zip(read.block_ids, [3, 4, 5], strict=True)))
    for block_id, row in enumerate(expected, 3):
        assert storage.read_block(block_id) == row.tobytes()
    assert tier.get_statistics().block_bytes == block_format.encoded_bytes
    tier.close()


def test_tokens_count_for_the_lowest_tier_that_they_need():
    request = Request("r", range(8), BlockHasher("sha256", block_size=4))
    groups = [GroupKeys(0, 4), GroupKeys(1, 4)]
    (a, b), (c, d) = (group.list_keys(request, 0, 2) for group in groups)
    indexes = [(0, ()), (1, (b, c)), (2, (a, d))]
    assert TierPrefixes(lambda: indexes, groups, 4).find(request, 0, 8) == {2: 8}
