"""`BlockHasher`: the name of a prefix, so that two requests can find out they share it."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import xxhash

from kv_pool.core.arguments import as_int, as_list, check_type, refuse_type
from kv_pool.core.extra_keys import CacheableRequest, ExtraKeys, ExtraKeysWalk, has_extra_keys
from kv_pool.core.token_packing import pack_cbor, pack_fixed
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import BlockHash, TokenIds

HASH_ALGORITHMS = ("xxh3_128", "sha256", "sha256_cbor")

MAX_EXTRA_KEYS_DEPTH = 32
"""Containers inside each other that extra keys consist of at most; CBOR encoders recurse, and can crash."""

_FLAT_TYPES = (str, int, float, bytes, bytearray, type(None))

_VLLM_SEED = "vllm-none-hash"
_PROCESS_SEED = os.urandom(32).hex()


class BlockHasher:
    """Hashes token sequences block by block, each block over its parent's hash, tokens and extra keys.

        >>> from kv_pool import BlockHasher
        >>> hasher = BlockHasher("sha256_cbor", block_size=4)
        >>> [block_hash.hex()[:8] for block_hash in hasher.hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])]
        ['58d0879d', 'e1bc2939']

    Equal hashes stand for equal prefixes: same tokens, same extra keys, from the first token on.

    Args:
        algorithm:
            `xxh3_128`: fast, 16 bytes. Not collision-resistant against an attacker with the seed, which is
            therefore secret; each process draws its own, unless one is given.
            `sha256`: 32 bytes, collision-resistant: the safe choice when tenants share a pool.
            `sha256_cbor`: 32 bytes, byte for byte what vLLM 0.33 computes under that name; the same in
            every process and language.
        seed: goes into the root of every chain. Default for `xxh3_128`: random, the same for all hashers of
            a process (and of those it forks), so that they hash alike; other processes have another. For
            `sha256`: fixed. For `sha256_cbor`: vLLM's own default (vLLM uses PYTHONHASHSEED's value when that
            is set).
        block_size: tokens per hash, at least 1.
        num_lookahead_tokens: each hash also covers so many tokens after its block, and is only made once they
            are there (for drafters whose KV at a block's last position depends on them).

    Attributes:
        root: the parent of every first block.
        digest_size: bytes per hash.
    """

    def __init__(
        self,
        algorithm: str = "xxh3_128",
        seed: str | None = None,
        block_size: int = 16,
        num_lookahead_tokens: int = 0,
    ) -> None:
        check_type("algorithm", algorithm, str)
        if seed is not None and not isinstance(seed, str):
            refuse_type("seed", seed, "str or None")
        if not isinstance(block_size, int):
            block_size = as_int("block_size", block_size)
        if not isinstance(num_lookahead_tokens, int):
            num_lookahead_tokens = as_int("num_lookahead_tokens", num_lookahead_tokens)
        if algorithm not in HASH_ALGORITHMS:
            raise InvalidArgumentError(
                f"unknown hash algorithm {algorithm!r}; known are {', '.join(HASH_ALGORITHMS)}"
            )
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; it counts tokens, at least 1")
        if num_lookahead_tokens < 0:
            raise InvalidArgumentError(
                f"num_lookahead_tokens is {num_lookahead_tokens}; it counts tokens, 0 or more"
            )
        self.algorithm: str = algorithm
        self.block_size: int = block_size
        self.num_lookahead_tokens: int = num_lookahead_tokens
        self.digest_size: int = 16 if algorithm == "xxh3_128" else 32
        self.root: BlockHash
        self._xxh3_seed: int = 0
        if algorithm == "sha256_cbor":
            from cbor2 import dumps

            text = _VLLM_SEED if seed is None else seed
            _encode_seed(text)
            self.root = BlockHash(hashlib.sha256(dumps(text, canonical=True)).digest())
        elif algorithm == "sha256":
            text = "" if seed is None else seed
            self.root = BlockHash(hashlib.sha256(b"kv_pool sha256 " + _encode_seed(text)).digest())
        else:
            text = _PROCESS_SEED if seed is None else seed
            secret = hashlib.sha256(b"kv_pool xxh3_128 " + _encode_seed(text)).digest()
            self.root = BlockHash(secret[:16])
            self._xxh3_seed = int.from_bytes(secret[16:24], "big")

    def hash_blocks(
        self,
        token_ids: TokenIds,
        parent: BlockHash | None = None,
        extra_keys: Sequence[ExtraKeys | None] = (),
    ) -> list[BlockHash]:
        """Hashes of the full blocks of `token_ids`, head first; a partial block at the end has none.

        Args:
            token_ids: any sequence of ints in 0..2**64-1, a numpy array included.
            parent: hash of the block before the first token; None at the start of a sequence.
            extra_keys: one entry per block, None for a block without; may be shorter. Each is nested
                `MAX_EXTRA_KEYS_DEPTH` deep at most.
        Raises:
            InvalidArgumentError: a token out of range (says which), a parent of the wrong length.
                Or extra keys that are nested too deep, or text with a lone surrogate.
            InvalidTypeError: a token that is not an integer, an extra key that CBOR has no form for.
        Cost: packs all tokens in one pass, then one digest a block.
        """
        if parent is not None and not isinstance(parent, bytes):
            refuse_type("parent", parent, "bytes or None")
        if parent is not None and len(parent) != self.digest_size:
            raise InvalidArgumentError(
                f"parent has {len(parent)} bytes; {self.algorithm} hashes have {self.digest_size}"
            )
        if extra_keys:
            for position, keys in enumerate(as_list("extra_keys", extra_keys)):
                if keys is not None and not isinstance(keys, tuple):
                    refuse_type(f"extra_keys[{position}]", keys, "tuple or None")
        previous: bytes = self.root if parent is None else parent
        is_cbor = self.algorithm == "sha256_cbor"
        pieces = (pack_cbor if is_cbor else pack_fixed)(token_ids, self.block_size)
        extras = self._make_extras(token_ids, len(pieces), extra_keys)
        num_extras = len(extras)
        if self.num_lookahead_tokens:
            del pieces[num_extras:]  # those whose lookahead is not there yet
        xxh3: Callable[[bytes, int], bytes] = xxhash.xxh3_128_digest
        is_xxh3 = self.algorithm == "xxh3_128"
        seed = self._xxh3_seed
        hashes: list[BlockHash] = []
        for position, piece in enumerate(pieces):
            extra = extras[position] if position < num_extras else None
            if is_cbor:
                # array(3), byte string of 32, the parent, the tokens, then extra keys or null
                tail = b"\xf6" if extra is None else _encode(extra)
                payload = b"\x83\x58\x20" + previous + piece + tail
            else:
                payload = previous + piece if extra is None else previous + piece + _encode(extra)
            previous = xxh3(payload, seed) if is_xxh3 else hashlib.sha256(payload).digest()
            hashes.append(BlockHash(previous))
        return hashes

    def _make_extras(
        self, token_ids: Any, num_blocks: int, extra_keys: Sequence[ExtraKeys | None]
    ) -> Sequence[tuple[Any, ...] | None]:
        """What goes into each block's hash besides parent and tokens; one entry per block to be hashed."""
        num_lookahead = self.num_lookahead_tokens
        if not num_lookahead:
            return extra_keys
        extras: list[tuple[Any, ...] | None] = []
        for position in range(num_blocks):
            end = (position + 1) * self.block_size
            ahead = [int(token_id) for token_id in token_ids[end : end + num_lookahead]]
            if len(ahead) < num_lookahead:
                break
            keys = extra_keys[position] if position < len(extra_keys) else None
            extras.append((keys, *ahead))
        return extras

    def hash_request(self, request: CacheableRequest) -> list[BlockHash]:
        """Hashes of the full blocks that `request.block_hashes` does not cover yet. Changes nothing.

        Appended tokens cost their own blocks only. The tokens of a partial block at the end are checked too.
        Raises: as `hash_blocks`.
        """
        unchecked: Any = request
        try:
            known: Sequence[BlockHash] = unchecked.block_hashes
        except AttributeError:
            refuse_type("request", request, "a request")
        start = len(known) * self.block_size
        token_ids = request.all_token_ids[start:]
        num_blocks = len(token_ids) // self.block_size
        extra_keys: list[ExtraKeys | None] = []
        if has_extra_keys(request):
            covered = self.block_size + self.num_lookahead_tokens
            walk = ExtraKeysWalk(request)
            for first in range(start, start + num_blocks * self.block_size, self.block_size):
                extra_keys.append(walk.find(first, first + covered))
        return self.hash_blocks(token_ids, known[-1] if known else None, extra_keys)


def _encode(extra: tuple[Any, ...]) -> bytes:
    from cbor2 import CBOREncodeError, dumps

    for key in extra:  # as a rule tuples of text and numbers
        is_flat = isinstance(key, tuple)
        if is_flat:
            for part in key:
                if not isinstance(part, (str, int, bytes)):
                    is_flat = False
        if not is_flat:
            _check_depth(extra)
            break
    try:
        return dumps(extra, canonical=True)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"extra keys (salt, adapter, multimodal identifiers) are no text that can be hashed: {error}"
        ) from error
    except (CBOREncodeError, TypeError) as error:
        raise InvalidTypeError(f"extra keys can not be hashed: {error}") from error


def _check_depth(extra: tuple[Any, ...]) -> None:
    """Raise InvalidArgumentError if containers are nested too deep, or contain themselves."""
    from cbor2 import CBORTag

    level: dict[int, Any] = {0: extra}
    for _ in range(MAX_EXTRA_KEYS_DEPTH):
        inner: dict[int, Any] = {}  # by identity: a container that is in several places is looked at once
        for one in level.values():
            parts: Iterable[Any] = ()
            if isinstance(one, (tuple, list, Sequence, Set)):
                parts = one
            elif isinstance(one, Mapping):
                parts = chain(one, one.values())
            elif isinstance(one, CBORTag):
                parts = (one.value,)
            for part in parts:
                if not isinstance(part, _FLAT_TYPES):
                    inner[id(part)] = part
        if not inner:
            return
        level = inner
    raise InvalidArgumentError(
        f"extra keys (salt, adapter, multimodal identifiers) are nested more than {MAX_EXTRA_KEYS_DEPTH} "
        f"deep; use text or a digest in place of the structure"
    )


def _encode_seed(seed: str) -> bytes:
    try:
        return seed.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the seed is no text that can be hashed: {error}") from error
