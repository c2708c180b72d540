"""`BlockLayout`: what the bytes and the hashes of a pool's blocks mean; equal, or nothing is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import LayoutMismatchError
from kv_pool.storage.block_storage import BlockStorage


class BlockLayout(msgspec.Struct, frozen=True):
    """What two pools have to agree on before one may use the other's blocks.

    Where the bytes lie may differ: strides, padding, the device. Their order within a block may not.

    Attributes:
        block_format: of the storage: element type and sizes, in the order of a block's bytes.
        block_bytes: of one block, all layers.
        block_size: tokens per block.
        hash_algorithm: by which blocks are named; "" for hashes that are not the hasher's, such as a trace's.
        hash_seed: first 8 bytes of the SHA-256 of the hasher's root, in hex. The root itself is secret.
        groups: the KV cache groups, each in words; () for one group of full attention.
        model: the model's name; "" where it was not named.
        weights: which weights of it, such as a revision or a digest; "" where they were not named.
    """

    block_format: str
    block_bytes: int
    block_size: int
    hash_algorithm: str = ""
    hash_seed: str = ""
    groups: tuple[str, ...] = ()
    model: str = ""
    weights: str = ""

    @classmethod
    def describe(
        cls,
        storage: BlockStorage,
        block_size: int,
        hasher: BlockHasher | None = None,
        groups: Sequence[str] = (),
        *,
        model: str = "",
        weights: str = "",
    ) -> BlockLayout:
        """The layout of the blocks of a storage, named by a hasher.

        Name `model` and `weights` wherever blocks outlive the process or go to other nodes. To another model,
        or to other weights, KV of the same shape and hashes is noise.
        """
        return cls(
            storage.block_format,
            storage.block_bytes,
            block_size,
            "" if hasher is None else hasher.algorithm,
            "" if hasher is None else hashlib.sha256(hasher.root).hexdigest()[:16],
            tuple(groups),
            model,
            weights,
        )

    def get_fingerprint(self) -> str:
        """32 hex digits that differ where layouts do."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]

    def check_same(self, other: BlockLayout, there: str) -> None:
        """Raise LayoutMismatchError unless the other layout is this one; says in what they differ.

        A model that is named on one side only is another one: nothing is known of it.

        Args:
            there: whose the other layout is, in words.
        """
        different = [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} there"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        if different:
            raise LayoutMismatchError(f"blocks of {there} can not be used here: {'; '.join(different)}")
