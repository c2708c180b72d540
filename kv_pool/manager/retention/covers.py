"""`Covers`: the claims on blocks in use, remembered for when they become free."""

from mypy_extensions import i32

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.retention.claim import Claim
from kv_pool.manager.retention.retention_ids import RetentionIds


class Cover:
    """The same claims on any number of blocks.

    Attributes:
        claims: never empty.
        num_blocks: those with its number, or with that of the opposite sign: the claims on these are void.
    """

    __slots__ = ("claims", "num_blocks", "retention_id")

    def __init__(self, claims: tuple[Claim, ...]) -> None:
        self.claims: tuple[Claim, ...] = claims
        self.num_blocks: int = 0
        self.retention_id: int = 0


class Covers:
    """One cover for each set of claims.

    Attributes:
        num_blocks: blocks under any of them, void or not.
    """

    def __init__(self, ids: RetentionIds) -> None:
        self._ids: RetentionIds = ids
        self.by_claims: dict[tuple[Claim, ...], Cover] = {}
        self.num_blocks: int = 0

    def put(self, block: KVCacheBlock, claims: tuple[Claim, ...], likely: Cover | None) -> Cover:
        """These claims, at least one, and no others are on the block, which is in use and not kept.

        Args:
            likely: the cover of the block before; blocks come in stretches.
        Returns:
            Its cover.
        """
        if block._retention_id != 0:
            self.drop(block)
        cover = likely
        if cover is None or cover.claims is not claims or cover.num_blocks == 0:
            cover = self.find(claims)
        block._retention_id = cover.retention_id
        cover.num_blocks += 1
        self.num_blocks += 1
        return cover

    def find(self, claims: tuple[Claim, ...]) -> Cover:
        """Return the cover of these claims, at least one; a new one has no blocks yet."""
        cover = self.by_claims.get(claims)
        if cover is None:
            cover = Cover(claims)
            cover.retention_id = self._ids.add(cover)
            self.by_claims[claims] = cover
        return cover

    def count_more(self, cover: Cover, num_blocks: int) -> None:
        """Count blocks that have got the number of the cover."""
        cover.num_blocks += num_blocks
        self.num_blocks += num_blocks

    def drop(self, block: KVCacheBlock) -> None:
        """Nothing is known any more of a block that is covered, void or not."""
        cover = self._ids.find(block)
        assert isinstance(cover, Cover)
        block._retention_id = 0
        self._drop_count(cover, 1)

    def drop_stretch(self, blocks: list[KVCacheBlock]) -> None:
        """Nothing is known any more of these blocks, of which none is kept."""
        last_id: i32 = 0
        cover: Cover | None = None
        num_blocks = 0
        for block in blocks:
            if block._retention_id == 0:
                continue
            if block._retention_id != last_id:
                if cover is not None:
                    self._drop_count(cover, num_blocks)
                last_id = block._retention_id
                cover = self._ids.find(block)
                num_blocks = 0
            num_blocks += 1
            block._retention_id = 0
        if cover is not None:
            self._drop_count(cover, num_blocks)

    def _drop_count(self, cover: Cover, num_blocks: int) -> None:
        self.num_blocks -= num_blocks
        cover.num_blocks -= num_blocks
        if cover.num_blocks == 0:
            del self.by_claims[cover.claims]
            self._ids.remove(cover.retention_id)

    def drop_all(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Of all the pool's blocks, which are these, those that are covered are so no more."""
        if self.num_blocks:
            for block in blocks:
                if isinstance(self._ids.find(block), Cover):
                    block._retention_id = 0
        for cover in self.by_claims.values():
            self._ids.remove(cover.retention_id)
        self.by_claims.clear()
        self.num_blocks = 0

    def rebuild(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Derive the counts from the numbers of all blocks of the pool; free blocks lose their claims."""
        by_claims: dict[tuple[Claim, ...], Cover] = {}
        counts: dict[Cover, int] = {}
        for block in blocks:
            cover = self._ids.find(block)
            if not isinstance(cover, Cover):
                continue
            if block.ref_cnt == 0:
                block._retention_id = 0
                continue
            by_claims[cover.claims] = cover
            counts[cover] = counts.get(cover, 0) + 1
        for cover, num_blocks in counts.items():
            cover.num_blocks = num_blocks
        self.by_claims = by_claims
        self.num_blocks = sum(counts.values())
