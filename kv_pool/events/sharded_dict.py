"""`ShardedDict`: a dict in pieces, so that no single operation takes long."""

from typing import Final, Generic, TypeVar

from kv_pool.ids import ExternalBlockHash

NUM_SHARDS: Final = 256

Value = TypeVar("Value")


class ShardedDict(Generic[Value]):
    """A map from block hashes to values, spread over `NUM_SHARDS` dicts.

    Copying, growing or dropping a dict is a single call that blocks all other threads: for milliseconds with
    100,000 entries, for microseconds with a 256th of them.
    """

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[ExternalBlockHash, Value]] = [{} for _ in range(NUM_SHARDS)]

    def shard(self, block_hash: ExternalBlockHash) -> dict[ExternalBlockHash, Value]:
        """Return the dict that this hash belongs to."""
        return self.shards[find_shard(block_hash)]

    def __contains__(self, block_hash: ExternalBlockHash) -> bool:
        return block_hash in self.shard(block_hash)

    def __len__(self) -> int:
        return sum(map(len, self.shards))


def find_shard(block_hash: ExternalBlockHash) -> int:
    """Return the index of the shard that this hash belongs to."""
    return hash(block_hash) % NUM_SHARDS
