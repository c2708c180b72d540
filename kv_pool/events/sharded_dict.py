"""`ShardedDict`: a dict in pieces, so that no single operation on it takes long."""

from typing import Final, Generic, TypeVar

from kv_pool.ids import ExternalBlockHash

NUM_SHARDS: Final = 256

Value = TypeVar("Value")


class ShardedDict(Generic[Value]):
    """From block hashes to values, spread over `NUM_SHARDS` dicts.

    Copying, growing or dropping a dict is one call during which no other thread runs: some milliseconds with
    100,000 entries, and microseconds with a 256th of them.
    """

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[ExternalBlockHash, Value]] = [{} for _ in range(NUM_SHARDS)]

    def shard(self, block_hash: ExternalBlockHash) -> dict[ExternalBlockHash, Value]:
        """The dict that has this hash, if any has."""
        return self.shards[find_shard(block_hash)]

    def __contains__(self, block_hash: ExternalBlockHash) -> bool:
        return block_hash in self.shard(block_hash)

    def __len__(self) -> int:
        return sum(map(len, self.shards))


def find_shard(block_hash: ExternalBlockHash) -> int:
    """The number of the shard that has this hash, if any has."""
    return hash(block_hash) % NUM_SHARDS
