"""A disk tier after a power failure: forgotten blocks stay away, and all found blocks are valid.

The tests record a tier's writes. At each crash point they open every possible state of the folder: with any
subset of the writes that were not made durable.
"""

import os
import shutil

import pytest
from tiers.crash_states import WriteLog, choose, make_rng
from tiers.made_tiers import Device, make_key

from kv_pool.tiers.disk_tier import DiskTier

KEYS = [make_key(number) for number in range(8)]
CAPACITY = 5


class Life:
    """A tier, its device, and the keys that were forgotten and not put again."""

    def __init__(self, folder):
        self.device = Device(len(KEYS))
        for block_id, key in enumerate(KEYS):
            self.device.write(block_id, key)
        self.folder = folder / "tier"
        self.crashed = folder / "crashed"
        self.forgotten = set()
        self.log = WriteLog(self.folder)
        self.tier = None
        self.reopen()

    def reopen(self):
        with self.log.record():
            if self.tier is not None:
                self.tier.close()
            self.tier = DiskTier(self.folder, CAPACITY, self.device.layout)

    def put(self, numbers):
        keys = self.tier.touch([KEYS[number] for number in numbers])
        self.forgotten.difference_update(keys)
        with self.log.record():
            self.tier.remove(self.tier.list_next_evicted(len(self.tier) + len(keys) - CAPACITY))
            self.tier.put(keys, self.device.storage, [KEYS.index(key) for key in keys])

    def remove(self, numbers):
        with self.log.record():
            self.tier.remove([KEYS[number] for number in numbers])

    def forget(self, numbers):
        with self.log.record():
            self.tier.forget([KEYS[number] for number in numbers])
        self.forgotten.update(KEYS[number] for number in numbers)

    def clear(self):
        with self.log.record():
            self.tier.clear()
        self.forgotten.update(KEYS)

    def sync(self):
        with self.log.record():
            os.fsync(self.tier._files._headers)
            os.fsync(self.tier._files._blocks)

    def check_crashes(self, rng, max_states):
        """Open the possible states after a power failure now. Return their number."""
        num_states = 0
        for state in self.log.list_states(rng, max_states):
            shutil.rmtree(self.crashed, ignore_errors=True)
            self.crashed.mkdir(mode=0o700)
            shutil.copy(self.folder / "tier.json", self.crashed)
            for name, content in state.items():
                (self.crashed / name).write_bytes(content)
                (self.crashed / name).chmod(0o600)
            tier = DiskTier(self.crashed, CAPACITY, self.device.layout)
            found = tier.list_keys()
            assert not self.forgotten.intersection(found)
            read = tier.read(found)
            assert not read.failed
            for key, block_id in zip(read.keys, read.block_ids, strict=True):
                assert read.storage.read_block(block_id) == self.device.storage.read_block(KEYS.index(key))
            tier.close()
            num_states += 1
        return num_states


def test_key_evicted_before_forget_does_not_return(tmp_path):
    life = Life(tmp_path)
    life.put([0, 1])
    life.sync()
    life.remove([0])
    life.forget([0])
    assert life.check_crashes(make_rng(0), 64) == 1
    assert life.tier.list_keys() == [KEYS[1]]


def test_key_evicted_by_an_earlier_process_does_not_return(tmp_path):
    life = Life(tmp_path)
    life.put([0, 1])
    life.sync()
    life.remove([0])
    life.reopen()
    life.forget([0])
    life.check_crashes(make_rng(0), 64)


def test_forgotten_key_of_a_reused_slot_does_not_return(tmp_path):
    life = Life(tmp_path)
    life.put([0, 1, 2, 3, 4])
    life.sync()
    life.put([5])
    life.forget([0])
    assert life.check_crashes(make_rng(0), 64) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_power_cut_does_not_restore_forgotten_keys(tmp_path, seed):
    rng = make_rng(seed)
    life = Life(tmp_path)
    num_states = 0
    for _ in range(40):
        numbers = choose(rng, range(len(KEYS)), int(rng.integers(1, 4)))
        match rng.choice(["put", "put", "put", "remove", "forget", "clear", "sync", "reopen"]):
            case "put":
                life.put(numbers)
            case "remove":
                life.remove(numbers)
            case "forget":  # half of the time, keys that have left the tier
                gone = [number for number, key in enumerate(KEYS) if key not in life.tier]
                life.forget(gone if rng.random() < 0.5 else numbers)
            case "clear":
                if rng.random() < 0.3:
                    life.clear()
            case "sync":
                life.sync()
            case "reopen":
                life.reopen()
        num_states += life.check_crashes(rng, 12)
    assert num_states > 100
    life.tier.close()
