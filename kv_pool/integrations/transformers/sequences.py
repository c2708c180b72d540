"""`PagedSequences`: requests whose K and V are in the blocks of one pool and the bytes of one storage."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError, UnknownSequenceError
from kv_pool.ids import BlockMove
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.positions import list_slots
from kv_pool.manager.requests.request import Request
from kv_pool.manager.requests.request_state import dump_request, load_request
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.sequence_owner import SequenceOwner
from kv_pool.storage.kv_storage import KVStorage
from kv_pool.storage.move_plan import Moves
from kv_pool.storage.sharded_storage import ShardedStorage
from kv_pool.tiers.read_back import TierReadBack
from kv_pool.tiers.tiered_cache import TieredCache


def allocate_storage(model: Any, num_blocks: int, block_size: int, layout: str = "NHD") -> KVStorage:
    """A storage for the K and V of a transformers model: its heads and layers, its dtype and device.

    Args:
        model: a `PreTrainedModel` with full attention in all layers.
        num_blocks: those of the pool, the null block included.
        layout: see `KVStorage.allocate`.
    """
    return _allocate(model, num_blocks, block_size, layout, str(model.device), 1)


def allocate_shards(
    model: Any, num_blocks: int, block_size: int, devices: Sequence[str], layout: str = "NHD"
) -> ShardedStorage:
    """The same with an equal part of the KV heads on each of these devices; one may occur several times.

    Raises:
        InvalidArgumentError: no devices, or a number of KV heads that is no multiple of theirs.
    """
    num_kv_heads = model.config.get_text_config().num_key_value_heads
    if not devices or num_kv_heads % len(devices):
        raise InvalidArgumentError(f"{num_kv_heads} KV heads do not go in equal parts to {list(devices)}")
    return ShardedStorage(
        [_allocate(model, num_blocks, block_size, layout, device, len(devices)) for device in devices]
    )


def _allocate(
    model: Any, num_blocks: int, block_size: int, layout: str, device: str, num_shards: int
) -> KVStorage:
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVStorage.allocate(
        num_blocks,
        block_size,
        config.num_hidden_layers,
        config.num_key_value_heads // num_shards,
        head_size,
        str(model.dtype).removeprefix("torch."),
        device,
        layout,
        library="torch",
    )


class PagedSequences:
    """Requests of one pool with their K and V: admitted, grown, freed, forked, and migrated to another pool.

    It keeps no block ids: they are asked of the manager whenever the model runs. So blocks may be moved at
    any time between two runs, as long as bytes and ids are moved together; `defragment` does that, and so
    does a `Defragmenter`, to which this is a pool.

        sequences = PagedSequences(KVCacheManager(pool), allocate_storage(model, pool.num_gpu_blocks, 16))
        sequences.admit(request)
        model.generate(token_ids, past_key_values=PagedCache(sequences, [request]))

    Args:
        manager: of the pool that the blocks come from.
        storage: torch tensors with a block for each of the pool's and the manager's block size; several
            devices', each with some of the heads, as a `ShardedStorage`.
        run_length: what `get_fragmentation_rate` is about.
        tiers: colder homes of the pool's blocks; `admit` reads back what they have of a request.
    Raises:
        InvalidArgumentError: a storage that does not fit, or tiers of another pool or storage.

    `request.num_computed_tokens` is kept here: it says how many tokens have K and V in every layer. A block
    becomes findable when its last layer has been written, never before.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        storage: KVStorage | ShardedStorage,
        run_length: int = DEFAULT_RUN_LENGTH,
        tiers: TieredCache | None = None,
    ) -> None:
        num_blocks = manager.block_pool.num_gpu_blocks
        if storage.block_size != manager.block_size or storage.num_blocks < num_blocks:
            raise InvalidArgumentError(
                f"the storage has {storage.num_blocks} blocks of {storage.block_size} tokens, the pool "
                f"{num_blocks} of {manager.block_size}"
            )
        if not isinstance(storage.tensors[0], torch.Tensor) or not storage.has_values:
            raise InvalidArgumentError(
                "a model needs K and V in torch tensors; KVStorage.allocate(..., library='torch')"
            )
        if tiers is not None and (tiers.block_pool is not manager.block_pool or tiers.storage is not storage):
            raise InvalidArgumentError("the tiers are below another pool, or another storage")
        self.manager = manager
        self.storage = storage
        self.run_length = run_length
        self.tiers = tiers
        self.read_back = None if tiers is None else TierReadBack(manager, tiers)

    def admit(self, request: Request, max_prefix_tokens: int | None = None) -> int | None:
        """Give a request blocks for all its tokens: those of its longest cached prefix, and new ones.

        What colder tiers have of it beyond the device's own is read back.

        Args:
            request: without blocks: new, or freed before.
            max_prefix_tokens: reuse no more than this; all but the last token by default.
        Returns:
            How many tokens need not be computed, also in `request.num_computed_tokens`; None where the
            blocks do not fit, with nothing changed.
        Raises:
            CopyFailedError: the device did not take what was read back. The request has no blocks.
        """
        if self.read_back is not None:
            found = self.read_back.admit(
                request, max_prefix_tokens=max_prefix_tokens, delay_cache_blocks=True
            )
            return None if found is None else request.num_computed_tokens
        prefix = self.manager.get_computed_blocks(request, max_prefix_tokens)
        num_new_tokens = request.num_tokens - prefix.num_tokens
        if self.manager.allocate_slots(request, num_new_tokens, prefix, delay_cache_blocks=True) is None:
            return None
        request.num_computed_tokens = prefix.num_tokens
        return prefix.num_tokens

    def reserve(self, request: Request, num_new_tokens: int) -> bool:
        """Slots for so many tokens after the computed ones; False where they do not fit, nothing changed."""
        return self.manager.allocate_slots(request, num_new_tokens, delay_cache_blocks=True) is not None

    def begin_step(self) -> None:
        """All slots of a step are reserved, and none is written yet.

        What was in them goes to the tiers, and blocks that replace shared ones get their bytes.
        """
        if self.tiers is not None:
            self.tiers.flush()
        self.storage.apply_moves(self.manager.take_block_copies())

    def get_slots(self, request: Request, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots of the request's positions `[start, stop)` right now: (stop - start,), int64."""
        block_ids = self.manager.get_block_ids(request.request_id)
        return list_slots(block_ids, start, stop, self.manager.block_size)

    def note_computed(self, request: Request, num_tokens: int) -> None:
        """K and V of the first `num_tokens` tokens are written in every layer.

        Full blocks among those whose tokens the request knows become findable. Call it again when tokens
        that were computed before are appended, as after `generate`.
        """
        request.num_computed_tokens = num_tokens
        self.manager.cache_blocks(request, min(num_tokens, request.num_tokens))

    def free(self, request: Request) -> None:
        """Give its blocks back. It may be admitted again: what is still cached then is not computed anew."""
        self.manager.free(request)
        request.num_computed_tokens = 0

    def fork(self, request: Request, child: Request) -> bool:
        """Let `child` go on from where `request` is, in the same blocks.

        Full blocks that are cached are shared, by one more reference. The last block, which both will write
        to, is copied, and so is any that is not cached.

        Args:
            child: without blocks, with the tokens of `request` that have been computed, and at least one
                more.
        Returns:
            False where the blocks do not fit, with nothing changed.
        Raises:
            InvalidArgumentError: other tokens. Nothing has changed.
            CopyFailedError: the child has no blocks.
        """
        num_tokens = request.num_computed_tokens
        if (
            child.num_tokens <= num_tokens
            or child.all_token_ids[:num_tokens] != request.all_token_ids[:num_tokens]
        ):
            raise InvalidArgumentError(
                f"request {child.request_id!r} does not go on from the {num_tokens} computed tokens of "
                f"{request.request_id!r}"
            )
        return self._copy_to(request, self, child)

    def migrate(self, request: Request, target: PagedSequences) -> bool:
        """Move a request with its K and V to another pool and storage, such as those of another device.

        What the target has cached of it is not copied. Here its blocks become free, and stay cached.

        Args:
            target: with the same hashes, block size and block format; another layout will do.
        Returns:
            False where the target has no room, with nothing changed.
        Raises:
            CopyFailedError, InvalidArgumentError: the request is still here, and nowhere else.
        """
        if target is self:
            raise InvalidArgumentError(f"request {request.request_id!r} is there already")
        num_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        try:
            has_moved = self._copy_to(request, target, request, num_tokens)
        except BaseException:
            request.num_computed_tokens = num_tokens
            raise
        if has_moved:
            self.manager.free(request)
        request.num_computed_tokens = num_tokens
        return has_moved

    def make_site(
        self,
        hasher: BlockHasher,
        requests: MutableMapping[str, Request],
        lock: AbstractContextManager[object] | None = None,
    ) -> PoolSite:
        """This pool for a `Migrator`: requests and prefixes come from other processes, and go there.

        Args:
            hasher: of the requests.
            requests: those that may be asked for, by id. One that moves away leaves it, and one that arrives
                is put into it, with its tokens, and goes on as it would have where it was.
            lock: held by whoever admits, runs or frees requests, for all of a forward pass; reentrant. None
                for a new one: the site's `lock`.

        Raises:
            InvalidArgumentError: a `ShardedStorage`, whose blocks are on several devices.

        Do not run a request of the site's `list_frozen()`: it is on its way.
        """
        if isinstance(self.storage, ShardedStorage):
            raise InvalidArgumentError(
                f"blocks in {len(self.storage.shards)} shards do not go to other processes; migrate() takes "
                "them to another pool of this one"
            )
        sequences = ManagerSequences(self.manager, self.storage, lock)
        return PoolSite(sequences, hasher=hasher, owner=_RequestOwner(requests, hasher))

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Bring the blocks in use together, with their K and V. Not while the model runs.

        Args:
            max_evictions: cached blocks that may be lost where too little is empty; the others there change
                places with blocks in use.
            max_moves: stop after this many; the next call continues. Two blocks that change places are
                two moves.
            goal: the fragmentation rate to come down to with few moves; None: to the lowest ids with them.
        Returns:
            How many blocks changed their id. What a request has cached is cached, and found, as before.
        Raises:
            InvalidArgumentError: the pool is no `RunBlockPool`.
            CopyFailedError: a round of moves broke off, see `compaction.apply_moves`. Requests have their
                bytes; of blocks that were changing places the cached ones may be evicted.
        """
        return compaction.compact(
            self._get_run_pool(),
            self.storage.apply_moves,
            run_length=self.run_length,
            goal=goal,
            max_moves=max_moves,
            max_evictions=max_evictions,
            scratch_ids=self.storage.scratch_ids,
        )

    def take_run(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take blocks with consecutive ids, as for a transfer; requests make way with their K and V.

        Returns:
            Blocks of the manager's pool, to be given back there; None where no run can be made. A later
            `defragment` moves them as well, unless they are held: `pool.hold(blocks, "sent to ...")`.
        Raises:
            InvalidArgumentError: the pool is no `RunBlockPool`.
            OutOfBlocksError: fewer blocks are free. In both cases nothing has changed.
            CopyFailedError: no block has moved, and none is taken.
        """
        pool = self._get_run_pool()
        run = compaction.take_run(pool, num_blocks, self.storage.apply_moves, lambda relocation: None)
        pool.store_pending()  # what was in the run: its taker writes when he likes
        return run

    def get_fragmentation_rate(self) -> float:
        """Share of the possible runs of `run_length` that is lost to scattering, 0 to 1. O(number of blocks).

        Raises:
            InvalidArgumentError: the pool is no `RunBlockPool`.
        """
        return self._get_run_pool().get_fragmentation_rate(self.run_length)

    def _get_run_pool(self) -> RunBlockPool:
        pool = self.manager.block_pool
        if not isinstance(pool, RunBlockPool):
            raise InvalidArgumentError(f"a {type(pool).__name__} does not know its runs; use a RunBlockPool")
        return pool

    def _find_copy(self, target: PagedSequences) -> Callable[[Moves], None]:
        """How blocks are copied to a target's storage."""
        if isinstance(self.storage, ShardedStorage) and isinstance(target.storage, ShardedStorage):
            return partial(self.storage.copy_to, target.storage)
        if isinstance(self.storage, KVStorage) and isinstance(target.storage, KVStorage):
            return partial(self.storage.copy_to, target.storage)
        raise InvalidArgumentError("one of the two storages is a ShardedStorage, the other is not")

    def _copy_to(
        self, request: Request, target: PagedSequences, copy: Request, num_tokens: int | None = None
    ) -> bool:
        """Give `copy` blocks in `target` with the K and V of `request`.

        |<-- found in the target's cache -->|<-- get new blocks, and the bytes of these -->|
        """
        num_tokens = request.num_computed_tokens if num_tokens is None else num_tokens
        manager = target.manager
        copy_blocks = self._find_copy(target)
        prefix = manager.get_computed_blocks(copy, num_tokens)
        num_new_tokens = num_tokens - prefix.num_tokens
        if manager.allocate_slots(copy, num_new_tokens, prefix, delay_cache_blocks=True) is None:
            return False
        sources = self.manager.get_block_ids(request.request_id)
        targets = manager.get_block_ids(copy.request_id)
        first = len(prefix.blocks[0])
        moves = [BlockMove(*pair) for pair in zip(sources[first:], targets[first:], strict=False)]
        manager.block_pool.store_pending()
        try:
            copy_blocks(moves)
        except BaseException:
            manager.free(copy)
            raise
        target.note_computed(copy, num_tokens)
        return True


def pad_rows(rows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """(num_rows, longest) slots or block ids; short rows repeat their first, whose K and V are written."""
    padded = np.empty((len(rows), max(len(row) for row in rows)), np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = row[0]
    return padded


class _RequestOwner(SequenceOwner[str]):
    """The requests that migrate, by id."""

    def __init__(self, requests: MutableMapping[str, Request], hasher: BlockHasher) -> None:
        self._requests = requests
        self._hasher = hasher

    def describe(self, sequence_id: str, /) -> bytes:
        if sequence_id not in self._requests:
            raise UnknownSequenceError(f"request {sequence_id!r} is not among those that may be asked for")
        return dump_request(self._requests[sequence_id])

    def take_over(self, sequence_id: str, state: bytes, /) -> None:
        self._requests[sequence_id] = load_request(state, self._hasher)

    def give_up(self, sequence_id: str, target: str, /) -> None:
        self._requests.pop(sequence_id, None)
