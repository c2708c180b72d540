"""Measure the cost of retention in a manager, with and without directives. See benchmarks/README.md."""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from measuring import Options, gc_off, in_turn, make_parser, read_options, start_run, write_results
from request_runs import read_requests

import kv_pool
from kv_pool import BlockRetention, KVCacheManager, RetentionDirective
from kv_pool.lab.replay_request import ReplayRequest

NONE = "no retention"
AGAIN = "no retention, again"  # shows the scatter of the measurement
IDLE = "retention, no directives"
PROMPT = "system prompts"
SESSIONS = "system prompts and sessions"
ALL = "every block, with a duration"
LANES = (NONE, AGAIN, IDLE, PROMPT, SESSIONS, ALL)


class Lane:
    """A manager with a scheduler that admits, decodes and frees; `batch_ns` has the time of each batch."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.steps = 0
        self.batch_ns: list[int] = []
        self.num_hit_tokens = 0
        pool = kv_pool.BlockPool(options.blocks, True, options.block_size)
        self.retention: BlockRetention | None = None
        if name not in (NONE, AGAIN):
            self.retention = BlockRetention(pool, lambda: float(self.steps), max_pinned_blocks=0)
        self.manager = KVCacheManager(pool, retention=self.retention)
        self.waiting: deque[ReplayRequest] = deque()
        self.running: list[ReplayRequest] = []
        num_tokens: int = options.system_tokens
        self.directives: Sequence[RetentionDirective] = ()
        if name in (PROMPT, SESSIONS):
            self.directives = [RetentionDirective(0, num_tokens, priority=80)]
        elif name == ALL:
            self.directives = [RetentionDirective(priority=50, duration_s=float(options.duration))]
        self.random = random.Random(0)

    def serve(self, requests: list[ReplayRequest]) -> None:
        """Run these requests, as many at a time as fit. Unfinished requests keep running afterwards."""
        self.waiting.extend(requests)
        start = time.perf_counter_ns()
        while self.waiting:
            self.step()
        self.batch_ns.append(time.perf_counter_ns() - start)

    def step(self) -> None:
        self.steps += 1
        manager = self.manager
        while self.waiting and len(self.running) < self.options.running:
            request = self.waiting[0]
            if self.directives and self.retention is not None:
                self.retention.set_directives(request.request_id, self.directives)
            prefix = manager.get_computed_blocks(request)
            added = manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            if added is None:
                break
            self.waiting.popleft()
            self.num_hit_tokens += prefix.num_tokens
            request.num_computed_tokens = request.num_tokens
            self.running.append(request)
        left = []
        for request in self.running:
            if request.num_output_left <= 0:
                self.finish(request)
                continue
            request.append_output(1)
            if manager.allocate_slots(request, 1) is None:
                self.finish(request)
                continue
            request.num_computed_tokens += 1
            left.append(request)
        self.running = left

    def finish(self, request: ReplayRequest) -> None:
        if self.name == SESSIONS and self.retention is not None and self.random.random() < 0.1:
            until = float(self.steps + self.options.duration)
            self.retention.keep_session(request.request_id, request, until)
        self.manager.free(request)


def make_batches(options: Options) -> list[list[ReplayRequest]]:
    """Return the trace's first requests in batches, with limited outputs; new objects for each lane."""
    fitting = []
    for request in read_requests(options.trace, options.block_size, options.requests):
        request.num_output_left = min(request.num_output_left, options.output)
        if request.num_tokens + options.output <= options.blocks * options.block_size:
            fitting.append(request)  # others would wait forever
    return [fitting[first : first + options.batch] for first in range(0, len(fitting), options.batch)]


def replay_once(options: Options, shift: int) -> list[Lane]:
    """Run all lanes over the same requests, batch by batch in turn."""
    # Each lane is created first in some runs, since the memory of lanes created later may be scattered.
    order = [Lane(name, options) for name in in_turn(LANES, shift)]
    batches = {lane.name: make_batches(options) for lane in order}
    for turn in range(len(batches[NONE])):
        for lane in order if turn % 2 else order[::-1]:
            with gc_off():
                lane.serve(batches[lane.name][turn])
    return sorted(order, key=lambda lane: LANES.index(lane.name))


def sum_batches(replays: list[list[Lane]], index: int, pick: Callable[[Sequence[int]], float]) -> float:
    """Pick one of each batch's times over the runs. Return the sum over all batches, in ns."""
    by_batch = zip(*[lanes[index].batch_ns for lanes in replays], strict=True)
    return float(sum(pick(times) for times in by_batch))


def main() -> None:
    parser = make_parser(__doc__, runs=7, seeded=False)
    parser.add_argument("--trace", default="mooncake_conversation", help="name of a bundled trace, or a file")
    parser.add_argument("--requests", type=int, default=1_500, help="number of requests")
    parser.add_argument(
        "--output", type=int, default=64, help="maximum number of generated tokens per request"
    )
    parser.add_argument("--running", type=int, default=16, help="number of running requests")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--blocks", type=int, default=30_000, help="blocks of each pool")
    parser.add_argument("--system-tokens", type=int, default=1024, help="tokens of a system prompt")
    parser.add_argument("--duration", type=int, default=2_000, help="steps that sessions and durations last")
    parser.add_argument("--batch", type=int, default=100, help="requests that one manager gets at a time")
    options = read_options(parser)
    provenance = start_run(options)
    replays = [replay_once(options, run) for run in range(options.runs)]
    print(f"{'':32}{'µs/request':>12}{'beside none':>13}{'p10':>8}{'p90':>8}{'fastest':>9}{'tokens hit':>14}")
    rows = []
    for index, name in enumerate(LANES):
        us_per_request = sum_batches(replays, index, statistics.median) / options.requests / 1e3
        ratio = sum_batches(replays, index, statistics.median) / sum_batches(replays, 0, statistics.median)
        fastest = sum_batches(replays, index, min) / sum_batches(replays, 0, min)
        ratios = sorted(
            ours / none
            for lanes in replays
            for ours, none in zip(lanes[index].batch_ns, lanes[0].batch_ns, strict=True)
        )
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        num_hit_tokens = replays[0][index].num_hit_tokens
        print(
            f"{name:32}{us_per_request:>12.1f}{ratio:>13.3f}{low:>8.3f}{high:>8.3f}{fastest:>9.3f}{num_hit_tokens:>14,}"
        )
        rows.append(
            {
                "name": name,
                "us_per_request": us_per_request,
                "beside_none": ratio,
                "fastest": fastest,
                "batch_ns": [lanes[index].batch_ns for lanes in replays],
                "tokens_hit": num_hit_tokens,
            }
        )
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
