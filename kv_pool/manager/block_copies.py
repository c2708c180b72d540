"""`BlockCopies`: copies that the engine has to make before it writes, because a shared block was replaced."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockMove


class BlockCopies:
    """Copies to be made. Their sources stay referenced until the engine has fetched the list.

    Until then no source is taken by anybody, so no block is both source and target.
    """

    def __init__(self, pool: BlockPoolCore) -> None:
        self._pool: BlockPoolCore = pool
        self._source_of: dict[KVCacheBlock, KVCacheBlock] = {}
        self._num_targets: dict[KVCacheBlock, int] = {}
        self._leaving: list[KVCacheBlock] = []  # with a reference to be given back

    def __len__(self) -> int:
        return len(self._source_of)

    def find_source(self, block: KVCacheBlock) -> KVCacheBlock:
        """Where the content of this block is: in another one, while it is not written yet itself."""
        return self._source_of.get(block, block)

    def add(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """`target` is to hold what `source` holds. The caller's reference to `source` goes over to this.

        Args:
            source: as `find_source` says.
        All or nothing, whatever interrupts it.
        """
        num_targets = self._num_targets.get(source, 0) + 1
        self._num_targets[source] = num_targets
        self._source_of[target] = source

    def list_sources(self) -> list[KVCacheBlock]:
        """The sources of the copies to be made; a block once for each copy."""
        return list(self._source_of.values())

    def count_targets(self, source: KVCacheBlock) -> int:
        """How many copies are to be made of this block: so many of its references are not a request's.

        Copies are made before the step writes, so the last request that holds a source may write to it.
        """
        return self._num_targets.get(source, 0)

    def check_made(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Raise InvalidArgumentError if one of these blocks of the request still lacks its content."""
        if any(block in self._source_of for block in blocks):
            raise InvalidArgumentError(
                f"request {request_id!r} has blocks whose content is still to be copied; apply "
                "take_block_copies() first"
            )

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the copies into blocks of this list that have no other holder.

        May be repeated, where an exception interrupted it.
        """
        if self._leaving:
            self.recover()
        for block in blocks:
            if block.ref_cnt == 1:
                source = self._source_of.get(block)
                if source is not None:
                    self._num_targets[source] -= 1
                    self._leaving += [source]
                    del self._source_of[block]
                    self._pool.free_out_of(self._leaving)

    def take(self) -> list[BlockMove]:
        """Hand over the copies; each source may be reused by whoever allocates next."""
        if not self._source_of:
            return []
        moves = [BlockMove(source.block_id, target.block_id) for target, source in self._source_of.items()]
        sources = list(self._source_of.values())
        nothing: dict[KVCacheBlock, KVCacheBlock] = {}
        no_counts: dict[KVCacheBlock, int] = {}
        try:
            self._pool.free_out_of(sources)
        finally:
            if not sources:  # given back: an interrupt comes too late
                self._source_of = nothing
                self._num_targets = no_counts
        return moves

    def recover(self) -> None:
        """Give back the sources that an interrupted call was about to give back."""
        self._pool.free_out_of(self._leaving)
