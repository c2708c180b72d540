"""`ContentOrigins`: which blocks are copies of others, for the case that content turns out to be bad."""

from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock


@mypyc_attr(allow_interpreted_subclasses=False)
class ContentOrigins:
    """The copies that were made in one pool, and what continues them. A pool's calls do not read it.

    Attributes:
        copied_from: copies of blocks, of this pool or another: see `note_copy`.
        continued_by: blocks whose copies were continued by other requests: see `note_continued`.
    """

    def __init__(self) -> None:
        self.copied_from: dict[KVCacheBlock, tuple[int, KVCacheBlock, int]] = {}
        self.continued_by: dict[KVCacheBlock, tuple[int, list[tuple[int, Any]]]] = {}
        self._num_continued_to_sweep_at: int = 64

    def note_copy(self, target: KVCacheBlock, source: KVCacheBlock) -> None:
        """Note that `target` is a copy of `source`: valid while the generations of both are those of now."""
        self.copied_from[target] = (target.generation, source, source.generation)

    def note_continued(self, source: KVCacheBlock, start: int, hashes: Any) -> None:
        """Note that a request continues a copy of a block that is not full, under hashes of its own.

        Args:
            start: the block's first token.
            hashes: the request's `block_hashes`, which may still grow.
        The note is valid while the generation of `source` is that of now.
        """
        noted = self.continued_by.get(source)
        if noted is None or noted[0] != source.generation:
            if len(self.continued_by) >= self._num_continued_to_sweep_at:
                for block, one in list(self.continued_by.items()):
                    if block.generation != one[0]:
                        del self.continued_by[block]
                self._num_continued_to_sweep_at = max(64, 2 * len(self.continued_by))
            noted = self.continued_by[source] = source.generation, []
        noted[1].append((start, hashes))
