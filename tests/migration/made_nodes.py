"""Shared parts of the migration tests: nodes over small pools, whose bytes are derived from their tokens."""

import hashlib
import threading
from concurrent.futures import Future

import numpy as np

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.migration import messages
from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.sequences import SequenceOwner
from kv_pool.migration.target import Pull
from kv_pool.migration.transfer_backend import ReadCount
from kv_pool.migration.verified_reads import PullSettings, RateLimit
from kv_pool.storage import KVStorage

BLOCK_SIZE = 4
HASHER = BlockHasher("sha256", block_size=BLOCK_SIZE)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Inline:
    """An executor that runs work immediately in the caller's thread."""

    def submit(self, work):
        future = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future


def make_pull(site, links, wanted, hold_s, lease_s, clock, on_change, unsettled, name="target"):
    """A pull that runs in one thread by one clock, without a limit of the rate."""
    limit = RateLimit(0.0, clock)
    settings = PullSettings(name, site, links, lease_s, 1.0, clock, limit, Inline(), on_change, unsettled)
    return Pull(settings, wanted, hold_s)


def answer_as_source(transfers, message, site):
    """Return the reply of a node that has only a source."""
    if isinstance(message, messages.DescribeNode):
        incarnation = transfers._incarnation
        return messages.NodeDescription("source", incarnation, site.layout, 0, 0, {}, messages.NodeLocation())
    answers = {
        messages.PrepareTransfer: transfers.prepare,
        messages.AskChecksums: transfers.compute_checksums,
        messages.RenewLease: transfers.renew,
        messages.AcknowledgeTransfer: transfers.acknowledge,
        messages.CancelTransfer: transfers.cancel,
    }
    return answers[type(message)](message)


class MadeEngine(SequenceOwner):
    """A scheduler with requests, a manager and a storage; a block's bytes are derived from its tokens."""

    def __init__(
        self,
        num_blocks=32,
        clock=None,
        head_size=8,
        block_bytes=None,
        groups=None,
        pool_class=BlockPool,
        model="",
        weights="",
        **manager_options,
    ):
        heads = 1 if block_bytes is None else block_bytes // (2 * BLOCK_SIZE * head_size * 2)
        self.storage = KVStorage.allocate(num_blocks, BLOCK_SIZE, 1, heads, head_size, "float16")
        self.pool = pool_class(num_blocks, True, BLOCK_SIZE, enable_kv_cache_events=True)
        self.manager = KVCacheManager(self.pool, groups=groups, **manager_options)
        self.requests = {}
        self.moved_away = {}
        self.lock = threading.RLock()
        options = {} if clock is None else {"clock": clock}
        sequences = ManagerSequences(self.manager, self.storage, self.lock)
        self.site = PoolSite(sequences, hasher=HASHER, owner=self, model=model, weights=weights, **options)

    def start(self, request_id, token_ids):
        """Admit a request, compute all its tokens, and write their bytes."""
        with self.lock:
            request = Request(request_id, token_ids, HASHER)
            prefix = self.manager.get_computed_blocks(request, request.num_tokens)
            new = self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            assert new is not None
            request.num_computed_tokens = request.num_tokens
            self.requests[request_id] = request
            for content, block_id in self.list_contents(request_id):
                self.storage.write_block(block_id, self.make_bytes(content))
            return request

    def finish(self, request_id):
        with self.lock:
            self.manager.free(self.requests.pop(request_id))

    def list_contents(self, request_id):
        """Return (expected content, block id) of each block of a request."""
        request = self.requests[request_id]
        found = []
        for group_id in range(len(self.manager.groups)):
            for position, block_id in enumerate(self.manager.get_block_ids(request_id, group_id)):
                if block_id:
                    covered = request.all_token_ids[: (position + 1) * BLOCK_SIZE]
                    found.append((f"{group_id} {covered}", block_id))
        return found

    def make_bytes(self, content):
        digest = hashlib.sha256(content.encode()).digest()
        return np.resize(np.frombuffer(digest, np.uint8), self.storage.block_bytes).tobytes()

    def hash_blocks(self, token_ids):
        return HASHER.hash_blocks(token_ids)

    def read(self, block_id):
        """Return the bytes of a block directly, without `read_block`."""
        return self.storage.tensors[0][block_id].tobytes()

    def check_all_cached(self, prompts):
        """Check that every cached block has the content of its hash."""
        for token_ids in prompts:
            for position, block_hash in enumerate(HASHER.hash_blocks(token_ids)):
                found = self.pool.get_cached_block(block_hash, [0])
                if found is not None:
                    content = f"0 {list(token_ids[: (position + 1) * BLOCK_SIZE])}"
                    data = self.read(found[0].block_id)
                    assert data == self.make_bytes(content), f"block {found[0].block_id}: {content}"

    def check_bytes(self, request_id):
        for content, block_id in self.list_contents(request_id):
            assert self.read(block_id) == self.make_bytes(content), f"block {block_id}: {content}"

    def check_prefix(self, token_ids):
        """Count the blocks of this prompt that can be hit here; check their bytes."""
        with self.lock:
            request = Request("a look", token_ids, HASHER)
            blocks = self.manager.get_computed_blocks(request, request.num_tokens).blocks[0]
            for position, block in enumerate(blocks):
                covered = list(token_ids[: (position + 1) * BLOCK_SIZE])
                assert self.read(block.block_id) == self.make_bytes(f"0 {covered}")
            return len(blocks)

    def describe(self, request_id):
        request = self.requests[request_id]
        return np.array([request.num_computed_tokens, *request.all_token_ids], np.int64).tobytes()

    def on_arrived(self, request_id, state):
        num_computed, *token_ids = np.frombuffer(state, np.int64).tolist()
        request = Request(request_id, token_ids, HASHER)
        request.num_computed_tokens = num_computed
        self.requests[request_id] = request

    def on_departed(self, request_id, target):
        del self.requests[request_id]
        self.moved_away[request_id] = target


def make_node(name, engine, backend=None, **options):
    return Migrator(name, engine.site, backends=[backend or InProcessBackend(engine.storage)], **options)


class HalvingBackend(InProcessBackend):
    """A backend whose readers read in two parts and call `between` after the first, to interfere."""

    def __init__(self, storage, between):
        super().__init__(storage)
        self.between = between

    def open(self, peer_name, description):
        reader = super().open(peer_name, description)
        read = reader.read

        def read_in_two(transfer_id, remote_ids, local_ids, deadline):
            half = len(local_ids) // 2
            first = read(transfer_id, remote_ids[:half], local_ids[:half], deadline)
            self.between()
            rest = read(transfer_id, remote_ids[half:], local_ids[half:], deadline)
            return ReadCount(first.num_bytes + rest.num_bytes, first.num_descriptors + rest.num_descriptors)

        reader.read = read_in_two
        return reader
