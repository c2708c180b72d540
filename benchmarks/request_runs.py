"""Requests that benchmarks run: drawn ones through a pool, those of traces through a manager, and vLLM's.

The packages are imported by the functions that need them: one script loads kv_pool as plain Python first, and
vLLM may be missing.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import gc_off

if TYPE_CHECKING:
    from kv_pool import BlockPool
    from kv_pool.lab.replay_request import ReplayRequest

AGENTIC = Path(__file__).parent.parent / "tests/lab/data/agentic_coding_a.jsonl.xz"
"""A trace of coding agents, which the tests read too."""
BLOCK_SIZE = 16
REQUEST_BLOCKS = 64
HASH_BYTES = 32


# ---- drawn requests, through a pool --------------------------------------------------------------


@dataclass
class BenchRequest:
    """The attributes of a request that kv_pool and vLLM read."""

    all_token_ids: list[int]
    block_hashes: list[Any]
    request_id: str = "bench"
    lora_request: None = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: None = None
    prompt_embeds: None = None
    session_id: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def draw_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(128_000), k=num_tokens)


def make_request(rng: random.Random, num_blocks: int, with_tokens: bool = True) -> BenchRequest:
    """Return a request with new hashes; its tokens are read only for events."""
    token_ids = draw_tokens(rng, num_blocks * BLOCK_SIZE) if with_tokens else []
    return BenchRequest(token_ids, [rng.randbytes(HASH_BYTES) for _ in range(num_blocks)])


def run_request(pool: Any, request: BenchRequest) -> None:
    """Allocate the request's blocks, cache all of them, free them tail first."""
    num_blocks = len(request.block_hashes)
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))


def fill_cache(pool: Any, rng: random.Random, request_blocks: int = REQUEST_BLOCKS) -> list[BenchRequest]:
    """Cache every block of the pool, then free all. Return the requests, the next to be evicted first."""
    requests = []
    left = pool.get_num_free_blocks()
    while left:
        request = make_request(rng, min(request_blocks, left))
        run_request(pool, request)
        left -= len(request.block_hashes)
        requests.append(request)
    pool.take_events()
    return requests


class Documents:
    """Documents of 2 to 96 blocks that are requested again and again (Zipf), each time with another tail."""

    def __init__(self, num_documents: int, mean_log_blocks: float, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = [
            min(96, max(2, int(rng.lognormvariate(mean_log_blocks, 0.8)))) for _ in range(num_documents)
        ]
        self.weights = [1 / (rank + 1) for rank in range(num_documents)]
        self.num_tails = 0

    def list_hashes(self, document: int) -> list[Any]:
        return [b"%d/%d" % (document, position) for position in range(self.sizes[document])]

    def make_tail(self, num_blocks: int) -> list[Any]:
        self.num_tails += num_blocks
        return [b"tail %d" % number for number in range(self.num_tails - num_blocks, self.num_tails)]

    def draw(self, max_tail: int) -> list[Any]:
        """Return the hashes of a prompt: a document and a tail of 1 to `max_tail` blocks."""
        [document] = self.rng.choices(range(len(self.sizes)), self.weights)
        return self.list_hashes(document) + self.make_tail(self.rng.randint(1, max_tail))


# ---- requests of traces, through a manager -------------------------------------------------------


def read_requests(trace: str, block_size: int, limit: int | None) -> "list[ReplayRequest]":
    """Return the first requests of a trace, whose name is that of a bundled one or of a file."""
    from kv_pool.lab import ReplaySettings

    settings = ReplaySettings(trace, 1, block_size=block_size, limit=limit)
    return list(settings.open_trace().read_requests())


def read_fitting_requests(
    trace: str, num_blocks: int, block_size: int, limit: int | None
) -> "list[ReplayRequest]":
    """Return those of the first requests of a trace that fit into a pool of `num_blocks` blocks."""
    requests = read_requests(trace, block_size, limit)
    return [request for request in requests if len(request.block_hashes) < num_blocks]


def run_requests(requests: "list[ReplayRequest]", pool: "BlockPool") -> tuple[float, int]:
    """Look up, allocate and free each request in turn.

    Returns:
        nanoseconds of processor time per prompt block, and the number of hit blocks.
    """
    from kv_pool import KVCacheManager

    manager = KVCacheManager(pool)
    num_blocks = num_hits = 0
    with gc_off():
        start = time.process_time_ns()
        for request in requests:
            prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
            manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            request.num_computed_tokens = request.num_tokens
            num_hits += prefix.num_tokens // pool.hash_block_size
            num_blocks += len(request.block_hashes)
            manager.free(request)
            request.num_computed_tokens = 0
        elapsed = time.process_time_ns() - start
    return elapsed / num_blocks, num_hits


# ---- vLLM's --------------------------------------------------------------------------------------


def make_vllm_hasher(algorithm: str) -> Callable[[Any], Sequence[bytes]]:
    """Return vLLM's request hasher, with a new root hash, which vLLM keeps in a global."""
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    hash_function = hashing.get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    hasher: Callable[[Any], Sequence[bytes]] = kv_cache_utils.get_request_block_hasher(
        BLOCK_SIZE, hash_function
    )
    return hasher


def make_vllm_request(request_id: str, token_ids: list[int], max_tokens: int, hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, eos_token_id=0)
    return Request(request_id, token_ids, params, None, block_hasher=hasher)


def make_vllm_config(num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)) -> Any:
    """Return a `KVCacheConfig` with one group of one layer for each window; None is full attention."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(
            [f"layer {number}"],
            SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes),
        )
        for number, window in enumerate(windows)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_vllm_manager(config: Any, block_size: int) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager(
        config, max_model_len=10_000_000, scheduler_block_size=block_size, hash_block_size=block_size
    )
