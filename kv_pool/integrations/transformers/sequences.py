"""`PagedSequences`: requests with K and V in the blocks of one pool and one storage."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError, UnknownSequenceError
from kv_pool.ids import BlockMove, NodeName, RequestId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import Request, dump_request, load_request
from kv_pool.manager.slot_mapping import list_slots
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.sequences import SequenceOwner
from kv_pool.storage.kv_storage import KVStorage
from kv_pool.storage.sharded_storage import ShardedStorage
from kv_pool.tiers.onboarder import TierOnboarder
from kv_pool.tiers.tiered_cache import TieredCache


def allocate_storage(model: Any, num_blocks: int, block_size: int, layout: str = "NHD") -> KVStorage:
    """Allocate a storage for a transformers model, with its heads, layers, dtype and device.

    Args:
        model: a `PreTrainedModel` with full attention in all layers.
        num_blocks: number of blocks of the pool, including the null block.
        layout: see `KVStorage.allocate`.
    """
    return allocate_shards(model, num_blocks, block_size, [str(model.device)], layout).shards[0]


def allocate_shards(
    model: Any, num_blocks: int, block_size: int, devices: Sequence[str], layout: str = "NHD"
) -> ShardedStorage:
    """Allocate a storage with an equal part of the KV heads on each device.

    Args:
        devices: a device may occur several times.
    Raises:
        InvalidArgumentError: no devices, or the number of KV heads is not a multiple of their number.
    """
    config = model.config.get_text_config()
    num_kv_heads = config.num_key_value_heads
    if not devices or num_kv_heads % len(devices):
        raise InvalidArgumentError(f"{num_kv_heads} KV heads cannot be divided equally over {list(devices)}")
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ShardedStorage(
        [
            KVStorage.allocate(
                num_blocks,
                block_size,
                config.num_hidden_layers,
                num_kv_heads // len(devices),
                head_size,
                str(model.dtype).removeprefix("torch."),
                device,
                layout,
                library="torch",
            )
            for device in devices
        ]
    )


class PagedSequences(ControlledManager):
    """The requests of one pool with their K and V: admit, grow, free, fork, and migrate to another pool.

    No block ids are kept: each forward pass asks the manager for them. Blocks may therefore be moved between
    two passes, as long as bytes and ids move together; `defragment` does this, and so does a `Defragmenter`,
    which accepts this object as its pool. Do not call either while the model runs.

    The methods of this class do not take `lock`. With a `ControlServer`, a `Migrator` or another thread that
    uses this object, hold it during `admit`, `free`, `fork`, `migrate`, `take_run` and each forward pass.

        sequences = PagedSequences(KVCacheManager(pool), allocate_storage(model, pool.num_gpu_blocks, 16))
        sequences.admit(request)
        model.generate(token_ids, cache=PagedCache(sequences, [request]))

    Args:
        manager: the manager of the pool.
        storage: torch tensors with a block per block of the pool and the manager's block size; a
            `ShardedStorage` for several devices, each with some of the heads.
        run_length: as for `ControlledManager`.
        tiers: lower tiers of the pool; `admit` onboards a request's blocks from them.
    Raises:
        InvalidArgumentError: a storage that does not fit, or tiers of another pool or storage.

    This class updates `request.num_computed_tokens`, the number of tokens with K and V in every layer.
    A block is cached only after its last layer has been written.
    """

    storage: KVStorage | ShardedStorage  # type: ignore[assignment] # of a model, in one part or several

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
                "a model needs K and V in torch tensors; use KVStorage.allocate(..., library='torch')"
            )
        if tiers is not None and (tiers.block_pool is not manager.block_pool or tiers.storage is not storage):
            raise InvalidArgumentError("the tiers belong to another pool or another storage")
        super().__init__(
            manager,
            storage=storage,  # type: ignore[arg-type] # compaction moves the blocks of shards together
            on_moved=lambda relocation: None,
            run_length=run_length,
        )
        self.tiers = tiers
        self.onboarder = None if tiers is None else TierOnboarder(manager, tiers)

    def admit(self, request: Request, max_prefix_tokens: int | None = None) -> int | None:
        """Give a request blocks for all its tokens: those of its longest cached prefix, and new ones.

        Blocks of the prefix that only lower tiers have are onboarded.

        Args:
            request: a request without blocks: new, or freed before.
            max_prefix_tokens: maximum number of tokens to reuse; by default all but the last token.
        Returns:
            The number of tokens that need not be computed, also in `request.num_computed_tokens`; None if the
            blocks do not fit, and nothing has changed.
        Raises:
            CopyFailedError: onboarded blocks could not be copied to the device. The request has no blocks.
        """
        if self.onboarder is not None:
            found = self.onboarder.admit(
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
        """Reserve slots for new tokens after the computed ones; return False if they do not fit.

        Nothing has changed then.
        """
        return self.manager.allocate_slots(request, num_new_tokens, delay_cache_blocks=True) is not None

    def begin_step(self) -> None:
        """Prepare reserved slots for writing. Call after all reservations of a step, before the first write.

        Flushes evicted blocks to the lower tiers, and copies shared blocks to their replacements.

        Raises:
            CopyFailedError: no copy is lost: call it again before the first write.
        """
        if self.tiers is not None:
            self.tiers.flush()
        self.storage.apply_moves(self.manager.copies.list_moves())
        self.manager.take_block_copies()

    def get_slots(self, request: Request, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the current slots of the request's positions `[start, stop)`: (stop - start,), int64."""
        block_ids = self.manager.get_block_ids(request.request_id)
        return list_slots(block_ids, start, stop, self.manager.block_size)

    def note_computed(self, request: Request, num_tokens: int) -> None:
        """Record that K and V of the first `num_tokens` tokens are written in every layer.

        Caches the full blocks among them whose tokens the request knows. Call this again after appending
        tokens that were already computed, for example after `generate`.
        """
        request.num_computed_tokens = num_tokens
        self.manager.cache_blocks(request, min(num_tokens, request.num_tokens))

    def free(self, request: Request) -> None:
        """Release a request's blocks. When it is admitted again, tokens still cached are not recomputed."""
        self.manager.free(request)
        request.num_computed_tokens = 0

    def fork(self, request: Request, child: Request) -> None:
        """Continue `child` from the computed tokens of `request`, in the same blocks.

        The first of the two to write to a shared block gets a copy of it.

        Args:
            child: a request without blocks, with the computed tokens of `request`.
        Raises:
            InvalidArgumentError: `child` has other tokens, see `KVCacheManager.fork`. Nothing has changed.
        """
        before = child.num_computed_tokens
        child.num_computed_tokens = request.num_computed_tokens
        try:
            self.manager.fork(request, child)
        except Exception:
            child.num_computed_tokens = before
            raise

    def migrate(self, request: Request, target: PagedSequences) -> bool:
        """Move a request with its K and V to another pool and storage, such as those of another device.

        Blocks that the target has cached are not copied. The blocks in this pool become free but stay cached.

        Args:
            target: must have the same hashes, block size and block format; the layout may differ.
        Returns:
            False if the blocks do not fit in the target, and nothing has changed.
        Raises:
            CopyFailedError, InvalidArgumentError: the request is still in this pool only.
        """
        if target is self:
            raise InvalidArgumentError(f"request {request.request_id!r} is already in the target pool")
        if isinstance(self.storage, ShardedStorage) is not isinstance(target.storage, ShardedStorage):
            raise InvalidArgumentError("one of the two storages is a ShardedStorage, the other is not")
        self.begin_step()  # its last block may be about to be copied from one that it shares
        manager, num_tokens = target.manager, request.num_computed_tokens
        request.num_computed_tokens = 0
        try:
            prefix = manager.get_computed_blocks(request, num_tokens)
            num_new_tokens = num_tokens - prefix.num_tokens
            if manager.allocate_slots(request, num_new_tokens, prefix, delay_cache_blocks=True) is None:
                return False
            # |<-- cached in the target -->|<-- new blocks, copied from the request's -->|
            sources = self.manager.get_block_ids(request.request_id)
            targets = manager.get_block_ids(request.request_id)
            first = len(prefix.blocks[0])
            moves = [BlockMove(*pair) for pair in zip(sources[first:], targets[first:], strict=False)]
            manager.block_pool.flush_evicted()
            with ExitStack() as on_failure:
                on_failure.callback(manager.free, request)
                self.storage.copy_to(target.storage, moves)  # type: ignore[arg-type] # of one kind, see above
                on_failure.pop_all()
        finally:
            request.num_computed_tokens = num_tokens
        target.note_computed(request, num_tokens)
        self.manager.free(request)
        return True

    def make_site(
        self,
        hasher: BlockHasher,
        requests: MutableMapping[RequestId, Request],
        lock: AbstractContextManager[object] | None = None,
    ) -> PoolSite:
        """Return a site for a `Migrator`, to exchange requests and prefixes with other processes.

        Args:
            hasher: the hasher of the requests.
            requests: requests that may migrate, by id. A request that migrates away is removed; one that
                arrives is added with its tokens, and can continue.
            lock: a reentrant lock of the caller, which becomes `lock` of this object; pass it before other
                threads use this object. None for the present `lock`.

        Raises:
            InvalidArgumentError: a `ShardedStorage`, as in `get_sequences`. Nothing has changed.

        Do not run requests in the site's `list_frozen()`: they are migrating.
        """
        sequences = self.get_sequences()
        sequences.lock = self.lock if lock is None else lock
        site = PoolSite(sequences, hasher=hasher, owner=_RequestOwner(requests, hasher))
        self.lock = sequences.lock
        return site

    def get_sequences(self) -> ManagerSequences:
        """Return the requests as the sequences of a `PoolSite`.

        Raises:
            InvalidArgumentError: a `ShardedStorage`, whose blocks are on several devices.
        """
        if isinstance(self.storage, ShardedStorage):
            raise InvalidArgumentError(
                f"blocks in {len(self.storage.shards)} shards cannot migrate to other processes; use "
                "migrate() for another pool of this process"
            )
        return super().get_sequences()

    def take_run(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take blocks with consecutive ids, for example for a transfer. Blocks of requests are moved away.

        Returns:
            Blocks of the manager's pool, to be freed there; None if no run can be made. A later `defragment`
            moves them, too, unless they are held: `pool.hold(blocks, "sent to ...")`.
        Raises:
            ControlError: the pool is not a `RunBlockPool`. Nothing has changed.
            OutOfBlocksError: too few blocks are free. Nothing has changed.
            CopyFailedError: no block has moved, and none is taken.
        """
        pool = self._get_run_pool()
        run = compaction.take_run(pool, num_blocks, self.storage.apply_moves, lambda relocation: None)
        pool.flush_evicted()  # flush the run's old contents before the caller writes to it
        return run


def pad_rows(rows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Pad rows of slots or block ids to (num_rows, longest) by repeating the first entry of short rows.

    The first entry always has valid K and V.
    """
    padded = np.empty((len(rows), max(len(row) for row in rows)), np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = row[0]
    return padded


class _RequestOwner(SequenceOwner[RequestId]):
    """The requests that may migrate, by id."""

    def __init__(self, requests: MutableMapping[RequestId, Request], hasher: BlockHasher) -> None:
        self._requests = requests
        self._hasher = hasher

    def describe(self, sequence_id: RequestId, /) -> bytes:
        if sequence_id not in self._requests:
            raise UnknownSequenceError(f"request {sequence_id!r} is not among the requests of this site")
        return dump_request(self._requests[sequence_id])

    def expect(self, sequence_id: RequestId, num_blocks: int, state: bytes, /) -> None:
        request = load_request(state, self._hasher)
        if request.request_id != sequence_id:
            raise InvalidArgumentError(
                f"the state is that of request {request.request_id!r}, not of {sequence_id!r}"
            )

    def on_arrived(self, sequence_id: RequestId, state: bytes, /) -> None:
        self._requests[sequence_id] = load_request(state, self._hasher)

    def on_departed(self, sequence_id: RequestId, target: NodeName, /) -> None:
        self._requests.pop(sequence_id, None)
