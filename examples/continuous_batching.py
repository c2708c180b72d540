"""A scheduler template: continuous batching with chunked prefill, preemption and swapping over the manager.

Requests of the bundled trace arrive on a virtual clock; they wait, run or are swapped out. The engine is a
stand-in that verifies the block tables: it writes each token into its slot, and computes a request's next
token from all of its slots. At the end each output is compared with one computed without blocks. The same
scheduler with a transformers model: examples/batching_a_model.py.

Run it: python examples/continuous_batching.py      needs the extra cli; --help for its options
The calls and their order are documented in kv_pool/manager/README.md.
"""

import argparse
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from kv_pool import BlockHasher, BlockPool, BlockSwapper, KVCacheManager, Request, RequestId
from kv_pool.lab import Trace
from kv_pool.manager import (
    PreemptionCost,
    PreemptionKind,
    PreemptionRule,
    count_loss,
    find_victim,
    list_slots,
)
from kv_pool.storage import KVStorage


class Sequence(Request):
    """A request with the fields that this scheduler needs."""

    def __init__(
        self, name: str, prompt: list[int], hasher: BlockHasher, num_output_tokens: int, priority: int = 0
    ) -> None:
        super().__init__(RequestId(name), prompt, hasher)
        self.max_tokens = len(prompt) + num_output_tokens
        self.priority = priority  # larger is more important
        self.arrival_ms = 0.0
        self.waited_ms: float | None = None  # until its first token

    def rank(self) -> tuple[int, float]:
        """Return the sort key of admission; the smallest is admitted first."""
        return -self.priority, self.arrival_ms


class Engine(Protocol):
    """An engine that runs the model; `device` and `host` contain the bytes of blocks."""

    device: KVStorage
    host: KVStorage

    def run(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        """Compute the next tokens of each request, and return the token that follows them."""


class Scheduler:
    """A scheduler of the tokens computed in each step. A request is in one of three lists until it ends."""

    def __init__(
        self,
        manager: KVCacheManager,
        swapper: BlockSwapper,
        engine: Engine,
        rule: PreemptionRule,
        token_budget: int = 512,
        max_running: int = 32,
        whole_prompts: bool = True,
    ) -> None:
        self.manager, self.swapper, self.engine, self.rule = manager, swapper, engine, rule
        self.token_budget, self.max_running = token_budget, max_running
        self.whole_prompts = whole_prompts  # admit a request only if its whole prompt fits
        self.waiting: list[Sequence] = []  # no blocks; by rank
        self.swapped: list[Sequence] = []  # blocks on the host; by rank
        self.running: list[Sequence] = []  # blocks on the device; in the order of admission
        self.done: Counter[str] = Counter()

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.swapped) + len(self.running)

    def add(self, request: Sequence) -> bool:
        """Queue a request; return False if it could not finish even alone."""
        if not self.manager.fits_alone(request.max_tokens):
            self.done["requests refused, larger than the pool"] += 1
            return False
        insort(self.waiting, request, key=Sequence.rank)
        return True

    def step(self) -> dict[Sequence, int]:
        """Run the model once, and return the number of tokens computed for each request."""
        batch = self.schedule()
        self.engine.device.apply_moves(self.manager.take_block_copies())  # none without forks
        for (request, num_tokens), token in zip(batch, self.engine.run(batch), strict=True):
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == request.num_tokens:  # otherwise its prompt is not complete
                request.append_output_token_ids([token])
            if request.num_tokens == request.max_tokens:
                self.running.remove(request)
                self.manager.free(request)
        return dict(batch)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return the batch: running requests by priority, then new ones unless a request was preempted."""
        batch: list[tuple[Sequence, int]] = []
        budget = self.token_budget
        num_running = len(self.running)
        for request in sorted(self.running, key=lambda request: -request.priority):
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens and request in self.running and self.make_room(request, num_tokens):
                batch.append((request, num_tokens))
                budget -= num_tokens
        if len(self.running) == num_running:
            while budget and len(self.running) < self.max_running and (num_tokens := self.admit_next(budget)):
                batch.append((self.running[-1], num_tokens))
                budget -= num_tokens
        return batch

    def make_room(self, request: Sequence, num_tokens: int) -> bool:
        """Allocate slots for the request's next tokens; return False if it was preempted itself."""
        while self.manager.allocate_slots(request, num_tokens) is None:
            # `schedule` visits the victim after this request, so it has no slots in this step yet.
            victim = find_victim(self.running, lambda request: request.priority)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Sequence) -> None:
        wants_swap = self.rule(count_loss(self.manager, request)) is PreemptionKind.SWAP
        plan = self.swapper.swap_out(request) if wants_swap else None
        self.running.remove(request)
        if plan is not None:
            plan.apply(lambda moves: self.engine.device.copy_to(self.engine.host, moves))
            insort(self.swapped, request, key=Sequence.rank)
            self.done["swapped out"] += 1
            self.done["blocks copied out"] += len(plan.moves)
        else:  # by the rule, or because the host is full
            self.manager.free(request)
            request.num_computed_tokens = 0
            insort(self.waiting, request, key=Sequence.rank)
            self.done["freed, to be recomputed"] += 1

    def admit_next(self, budget: int) -> int:
        """Admit the first request by rank; return its number of tokens in this step, 0 if it has to wait."""
        queues = [queue for queue in (self.swapped, self.waiting) if queue]
        if not queues:
            return 0
        queue = min(queues, key=lambda queue: queue[0].rank())
        request = queue[0]
        if queue is self.swapped:
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            plan = self.swapper.swap_in(request, num_new_tokens=num_tokens)  # None if they do not fit
            if plan is None:
                return 0
            plan.apply(lambda moves: self.engine.host.copy_to(self.engine.device, moves))
            self.done["blocks copied in"] += len(plan.moves)
            self.manager.allocate_slots(request, num_tokens)
        else:
            prefix = self.manager.get_computed_blocks(request)
            num_tokens = min(request.num_tokens - prefix.num_tokens, budget)
            blocks = self.manager.allocate_slots(
                request, num_tokens, prefix, full_sequence_must_fit=self.whole_prompts
            )
            if blocks is None:
                return 0
            request.num_computed_tokens = prefix.num_tokens
            self.done["tokens found in the cache"] += prefix.num_tokens
        self.done["tokens of admitted requests"] += request.num_tokens if queue is self.waiting else 0
        self.running.append(queue.pop(0))
        return num_tokens


class StandIn:
    """An engine whose model is a sum. The key of a token is its id, its value its position."""

    def __init__(self, manager: KVCacheManager, num_host_blocks: int) -> None:
        self.manager = manager
        self.device, self.host = (
            KVStorage.allocate(num_blocks, manager.block_size, 1, 1, 1, dtype="float64")
            for num_blocks in (manager.block_pool.num_gpu_blocks, num_host_blocks)
        )

    def run(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        """Write all tokens before reading any, as each layer of a model does: a block filled in this step
        may already be the prefix of another request."""
        for request, num_tokens in batch:
            start = request.num_computed_tokens
            end = start + num_tokens
            content = np.array([request.all_token_ids[start:end], range(start, end)], float)
            self.device.write(0, self.find_slots(request, start, end), *content[:, :, None, None])
        ends = [request.num_computed_tokens + num_tokens for request, num_tokens in batch]
        return [
            predict(*self.device.read(0, self.find_slots(request, 0, end)))
            for (request, _), end in zip(batch, ends, strict=True)
        ]

    def find_slots(self, request: Sequence, start: int, end: int) -> Any:
        block_ids = self.manager.get_block_ids(request.request_id)
        return list_slots(block_ids, start, end, self.manager.block_size)


def predict(token_ids: Any, positions: Any) -> int:
    return int(np.dot(np.ravel(token_ids), np.ravel(positions) % 97 + 1)) % 50_021


def generate_without_blocks(request: Sequence) -> list[int]:
    token_ids = request.all_token_ids[: request.num_prompt_tokens]
    while len(token_ids) < request.max_tokens:
        token_ids.append(predict(np.array(token_ids, float), np.arange(len(token_ids))))
    return token_ids


def read_trace(num_requests: int, speedup: float, block_size: int) -> Iterator[Sequence]:
    """Yield the trace's requests at a scale of 1:32: its blocks of 512 tokens become blocks of 16, with the
    same common prefixes. Every tenth request gets a higher priority."""
    hasher = BlockHasher("sha256", block_size=block_size)
    for traced in islice(Trace("mooncake_conversation"), num_requests):
        tokens = [16 * hash_id + i for hash_id in traced.hash_ids or [] for i in range(16)]
        prompt = tokens[: -(-traced.input_length // 32)]
        num_output_tokens = max(1, traced.output_length // 8)
        request = Sequence(f"{traced.line}", prompt, hasher, num_output_tokens, int(traced.line % 10 == 0))
        request.arrival_ms = traced.arrival_ms / speedup
        yield request


def main() -> None:
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=180, help="number of blocks of 16 tokens on the device")
    parser.add_argument("--host-blocks", type=int, default=180)
    parser.add_argument("--speedup", type=float, default=1.0, help="factor by which requests arrive faster")
    options = parser.parse_args()

    manager = KVCacheManager(BlockPool(options.blocks + 1, True, 16), watermark=0.01)
    swapper = BlockSwapper(manager, BlockPool(options.host_blocks + 1, True, 16, medium="CPU"))
    rule = PreemptionCost(prefill_tokens_per_s=10_000, copy_bytes_per_s=2e9, block_bytes=1_000_000)
    scheduler = Scheduler(manager, swapper, StandIn(manager, options.host_blocks + 1), rule)

    arrivals = read_trace(options.requests, options.speedup, 16)
    coming = next(arrivals, None)
    served: list[Sequence] = []
    num_steps = num_computed = 0
    now_ms = 0.0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=options.requests)
        while coming or scheduler.num_unfinished:
            if coming and not scheduler.num_unfinished:
                now_ms = max(now_ms, coming.arrival_ms)
            while coming and coming.arrival_ms <= now_ms:
                if scheduler.add(coming):
                    served.append(coming)
                coming = next(arrivals, None)
            computed = scheduler.step()
            num_tokens = sum(computed.values())
            now_ms += 10 + num_tokens / 10  # a fixed time per step, and a time per token
            num_steps += bool(computed)
            num_computed += num_tokens
            for request in computed:
                if request.waited_ms is None and request.num_tokens > request.num_prompt_tokens:
                    request.waited_ms = now_ms - request.arrival_ms
            lists = (
                f"{len(scheduler.running)} run, {len(scheduler.waiting)} wait, {len(scheduler.swapped)} out"
            )
            progress.update(task, description=lists, completed=len(served) - scheduler.num_unfinished)

    assert manager.block_pool.get_num_free_blocks() == options.blocks
    done = scheduler.done
    hits = done.pop("tokens found in the cache") / done.pop("tokens of admitted requests")
    waited_ms = [request.waited_ms or 0.0 for request in served]
    num_equal = sum(request.all_token_ids == generate_without_blocks(request) for request in served)
    sizes = f"{options.blocks} blocks of 16 tokens, {options.host_blocks} more on the host"
    print(f"{len(served)} requests on {sizes}")
    print(
        f"{num_steps:>7,} steps of {num_computed / num_steps:.0f} tokens, {now_ms / 1000:.0f} s on its clock"
    )
    print(f"{hits:>7.1%} of the tokens of admitted requests were cached")
    for what, count in sorted(done.items()):
        print(f"{count:>7,} {what}")
    mean_s, longest_s = np.mean(waited_ms) / 1000, max(waited_ms) / 1000
    print(f"{mean_s:>7.2f} s mean time to the first token; {longest_s:.2f} at most")
    print(f"{num_equal:>7,} of {len(served)} outputs equal those computed without blocks")


if __name__ == "__main__":
    main()

# prints:
# 396 requests on 180 blocks of 16 tokens, 180 more on the host
#   5,774 steps of 30 tokens, 142 s on its clock
#    3.9% of the tokens of admitted requests were cached
#      81 blocks copied in
#     628 blocks copied out
#       2 freed, to be recomputed
#       4 requests refused, larger than the pool
#      14 swapped out
#    0.52 s mean time to the first token; 2.76 at most
#     396 of 396 outputs equal those computed without blocks
