"""`BlockLayout`: a description of the bytes and hashes of a pool's blocks, to check compatibility."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import LayoutMismatchError
from kv_pool.ids import BlockHash
from kv_pool.storage.block_storage import BlockStorage


class BlockLayout(msgspec.Struct, frozen=True):
    """The properties that must be equal in two pools before one may use the other's blocks.

    Strides, padding and device may differ; the order of the bytes within a block may not.

    Attributes:
        block_format: the storage's element type and sizes, in the order of a block's bytes.
        block_bytes: bytes of one block, all layers.
        block_size: tokens per block.
        hash_algorithm: algorithm of the block hashes; "" if they are not made by a `BlockHasher`, such as
            those of a trace.
        hash_seed: first 8 bytes of the SHA-256 of the hasher's root, in hex. The root itself is secret.
        groups: a description of each KV cache group; () for one group of full attention.
        model: the model's name; "" if not given.
        weights: the version of its weights, such as a revision or a digest; "" if not given.
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
        storage: BlockStorage | None,
        block_size: int,
        hasher: BlockHasher | None = None,
        groups: Sequence[str] = (),
        *,
        model: str = "",
        weights: str = "",
    ) -> BlockLayout:
        """Return the layout of a storage whose blocks are hashed by `hasher`; None for a pool without bytes.

        Pass `model` and `weights` if blocks outlive the process or are sent to other nodes: KV of another
        model or of other weights may have the same shape and hashes, but is useless.
        """
        return cls(
            "" if storage is None else storage.block_format,
            0 if storage is None else storage.block_bytes,
            block_size,
            "" if hasher is None else hasher.algorithm,
            "" if hasher is None else describe_root(hasher.root),
            tuple(groups),
            model,
            weights,
        )

    def get_fingerprint(self) -> str:
        """Return 32 hex digits that differ for different layouts."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]

    def check_same(self, other: BlockLayout, there: str) -> None:
        """Raise LayoutMismatchError with the differences unless the layouts are equal.

        A model or weights given on one side only count as a difference.

        Args:
            there: the owner of the other layout, for the error message.
        """
        check_alike(f"blocks of {there}", self.__struct_fields__, self, other)

    def describe_differences(self, other: BlockLayout) -> str:
        """Describe how another layout, "there", differs from this one; "" if they are equal."""
        return describe_differences(self.__struct_fields__, self, other)


def describe_differences(names: Sequence[str], here: object, there: object) -> str:
    """Describe how these attributes of two objects differ; "" if they are equal."""
    return "; ".join(
        f"{name} is {getattr(here, name)!r} here and {getattr(there, name)!r} there"
        for name in names
        if getattr(here, name) != getattr(there, name)
    )


def check_alike(what: str, names: Sequence[str], here: object, there: object) -> None:
    """Raise LayoutMismatchError unless these attributes are equal, so that `what` can be used here."""
    different = describe_differences(names, here, there)
    if different:
        raise LayoutMismatchError(f"{what} cannot be used here: {different}")


def describe_root(root: BlockHash | None) -> str:
    """Return 16 hex digits that tell hashers' roots apart without revealing them; "" for None."""
    return "" if root is None else hashlib.sha256(root).hexdigest()[:16]
