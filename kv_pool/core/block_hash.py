"""`BlockHasher`: hash token sequences block by block, so that equal prefixes have equal hashes."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import xxhash

from kv_pool.core.arguments import as_count, as_list, check_type, refuse_type
from kv_pool.core.extra_keys import (
    CacheableRequest,
    ExtraKeys,
    ExtraKeysWalk,
    find_adapter_load,
    has_extra_keys,
    read_hashes,
)
from kv_pool.core.token_packing import pack_cbor, pack_fixed
from kv_pool.errors import InvalidArgumentError, InvalidTypeError, describe_known
from kv_pool.ids import BlockHash, TokenIds

_DEFAULT_SEEDS = {"xxh3_128": os.urandom(32).hex(), "sha256": "", "sha256_cbor": "vllm-none-hash"}
"""By algorithm. The first is random per process, the last one is vLLM's."""

HASH_ALGORITHMS = tuple(_DEFAULT_SEEDS)

MAX_EXTRA_KEYS_DEPTH = 32
"""The deepest nesting of containers in extra keys; CBOR encoders recurse and can crash on more."""

_random_roots: list[BlockHash] = []


def find_random_root() -> BlockHash | None:
    """Return the root of this process's hashers with a random seed; None if it has made none."""
    return _random_roots[0] if _random_roots else None


class BlockHasher:
    """A hasher of token sequences: each block's hash covers its parent's hash, tokens and extra keys.

        >>> from kv_pool import BlockHasher
        >>> hasher = BlockHasher("sha256_cbor", block_size=4)
        >>> [block_hash.hex()[:8] for block_hash in hasher.hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])]
        ['58d0879d', 'e1bc2939']

    Equal hashes mean equal prefixes: the same tokens and the same extra keys from the first token on.

    Args:
        algorithm:
            `xxh3_128`: fast, 16 bytes. Not collision-resistant against an attacker who knows the seed, so
            keep the seed secret; by default each process draws a random one.
            `sha256`: 32 bytes, collision-resistant: the safe choice if tenants share a pool.
            `sha256_cbor`: 32 bytes, byte for byte what vLLM 0.33 computes under that name; the same in
            every process and language.
        seed: part of the root of every chain. The default for `xxh3_128` is random per process: all hashers
            of a process and of its forked children hash alike, other processes differ. For `sha256` it is
            fixed. For `sha256_cbor` it is vLLM's default (vLLM uses the value of PYTHONHASHSEED if that is
            set).
        block_size: tokens per hash, at least 1.
        num_lookahead_tokens: number of tokens after its block that each hash also covers. A hash is made only
            when they are known. For drafters whose KV at a block's last position depends on them.

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
        if algorithm not in HASH_ALGORITHMS:
            raise InvalidArgumentError(
                f"unknown hash algorithm {algorithm!r}; {describe_known(algorithm, HASH_ALGORITHMS)}"
            )
        self.algorithm: str = algorithm
        self.block_size: int = as_count("block_size", block_size, 1)
        self.num_lookahead_tokens: int = as_count("num_lookahead_tokens", num_lookahead_tokens)
        self.digest_size: int = 16 if algorithm == "xxh3_128" else 32
        self.root: BlockHash
        self._xxh3_seed: int = 0
        text = _DEFAULT_SEEDS[algorithm] if seed is None else seed
        encoded = _encode_seed(text)
        if algorithm == "sha256_cbor":
            from cbor2 import dumps

            self.root = BlockHash(hashlib.sha256(dumps(text, canonical=True)).digest())
        elif algorithm == "sha256":
            self.root = BlockHash(hashlib.sha256(b"kv_pool sha256 " + encoded).digest())
        else:
            secret = hashlib.sha256(b"kv_pool xxh3_128 " + encoded).digest()
            self.root = BlockHash(secret[:16])
            self._xxh3_seed = int.from_bytes(secret[16:24], "big")
            if seed is None:
                _random_roots[:] = [self.root]

    def hash_blocks(
        self,
        token_ids: TokenIds,
        parent: BlockHash | None = None,
        extra_keys: Sequence[ExtraKeys | None] = (),
    ) -> list[BlockHash]:
        """Return the hashes of the full blocks of `token_ids`, head first. A partial last block has none.

        Args:
            token_ids: any sequence of ints in 0..2**64-1, for example a numpy array.
            parent: hash of the block before the first token; None at the start of a sequence.
            extra_keys: one entry per block, None for a block without extra keys; may be shorter. Each is
                nested at most `MAX_EXTRA_KEYS_DEPTH` deep.
        Raises:
            InvalidArgumentError: a token is out of range (the message names it), the parent has the wrong
                length, extra keys are nested too deep, or text has a lone surrogate.
            InvalidTypeError: a token is not an integer, or CBOR cannot encode an extra key.
        Cost: one pass over all tokens, then one digest per block.
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
            del pieces[num_extras:]  # blocks whose lookahead tokens are not known yet
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
        """Return what each block's hash covers besides parent and tokens; one entry per block to hash."""
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
        """Return the hashes of the full blocks that `request.block_hashes` does not cover yet.

        Changes nothing. Hashes only the new blocks, and also checks the tokens of a partial last block.
        Raises: as `hash_blocks`, and InvalidArgumentError for hashes of more tokens than the request has.
        """
        known = read_hashes(request)
        start = len(known) * self.block_size
        if start > len(request.all_token_ids):
            raise InvalidArgumentError(
                f"the request has {len(request.all_token_ids)} tokens but hashes for {start}; withdraw "
                "tokens together with their hashes, as Request.truncate() does"
            )
        token_ids = request.all_token_ids[start:]
        num_blocks = len(token_ids) // self.block_size
        extra_keys: list[ExtraKeys | None] = []
        if num_blocks and has_extra_keys(request):
            covered = self.block_size + self.num_lookahead_tokens
            walk = ExtraKeysWalk(request)
            load = find_adapter_load(request, self.algorithm != "sha256_cbor")
            for first in range(start, start + num_blocks * self.block_size, self.block_size):
                keys = walk.find(first, first + covered)
                extra_keys.append(keys if load is None or keys is None else (*keys, load))
        return self.hash_blocks(token_ids, known[-1] if known else None, extra_keys)


def _encode(extra: tuple[Any, ...]) -> bytes:
    from cbor2 import CBOREncodeError, dumps

    _check_depth(extra, MAX_EXTRA_KEYS_DEPTH)
    try:
        return dumps(extra, canonical=True)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"extra keys (salt, adapter, multimodal identifiers) cannot be encoded as UTF-8: {error}"
        ) from error
    except (CBOREncodeError, TypeError) as error:
        raise InvalidTypeError(f"extra keys cannot be hashed: {error}") from error


def _check_depth(container: Any, num_levels: int) -> None:
    """Raise InvalidArgumentError if containers are nested in more levels than this, or contain themselves."""
    if num_levels == 0:
        raise InvalidArgumentError(
            f"extra keys (salt, adapter, multimodal identifiers) are nested more than {MAX_EXTRA_KEYS_DEPTH} "
            f"deep; use text or a digest instead of the structure"
        )
    parts: Iterable[Any]
    if isinstance(container, (tuple, list, Sequence, Set)):
        parts = container
    elif isinstance(container, Mapping):
        parts = chain(container, container.values())
    else:
        from cbor2 import CBORTag

        parts = (container.value,) if isinstance(container, CBORTag) else ()
    for part in parts:
        if part is not None and not isinstance(part, (str, int, float, bytes, bytearray)):
            _check_depth(part, num_levels - 1)


def _encode_seed(seed: str) -> bytes:
    try:
        return seed.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the seed cannot be encoded as UTF-8: {error}") from error
