"""Tiers of every kind for one small storage, and blocks with bytes derived from their keys."""

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier

BLOCK_BYTES = 72


class Inverted:
    """A lossless block format other than raw: inverts each byte and appends twelve bytes."""

    name = "inverted"

    def __init__(self, block_bytes=BLOCK_BYTES):
        self.encoded_bytes = block_bytes + 12

    def encode(self, blocks):
        return np.pad(~blocks, ((0, 0), (0, 12)))

    def decode(self, encoded):
        return ~encoded[:, :-12]


def make_key(name, group_id=0):
    return hashlib.sha256(str(name).encode()).digest() + group_id.to_bytes(4, "big")


def bytes_of(key, num_bytes=BLOCK_BYTES):
    return hashlib.shake_128(key).digest(num_bytes)


class Device:
    """A storage of two arrays; blocks are written and compared by key."""

    def __init__(self, num_blocks=16):
        self.arrays = [np.zeros((num_blocks, 40), np.uint8), np.zeros((num_blocks, 4), np.int64)]
        self.storage = BlockStorage.wrap_state(self.arrays)
        self.layout = BlockLayout.describe(self.storage, 4)

    def write(self, block_id, key):
        self.storage.write_block(block_id, bytes_of(key))

    def holds(self, block_id, key):
        return self.storage.read_block(block_id) == bytes_of(key)


def make_tier(kind, device, folder: Path, capacity):
    """Create a tier; `kind` is `host`, `host-inverted`, `disk` or `disk-inverted`."""
    block_format = Inverted() if kind.endswith("inverted") else None
    if kind.startswith("host"):
        return HostTier(capacity, device.storage, block_format)
    return DiskTier(folder, capacity, device.layout, block_format)


KINDS = ("host", "host-inverted", "disk", "disk-inverted")


@contextmanager
def failing_writes(tier):
    """Make writes to the headers fail with EIO inside the block by redirecting them to unmapped memory."""
    headers = os.dup(tier._files._headers)
    memory = os.open("/proc/self/mem", os.O_RDWR)
    os.dup2(memory, tier._files._headers)
    try:
        yield
    finally:
        os.dup2(headers, tier._files._headers)
        os.close(headers)
        os.close(memory)
