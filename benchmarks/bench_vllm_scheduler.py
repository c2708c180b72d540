"""Measure vLLM's scheduler over vLLM's classes and over ours. See benchmarks/README.md for the columns."""

import json
import multiprocessing
import statistics
import sys
from multiprocessing.connection import Connection
from typing import Any

from measuring import Options, in_turn, make_parser, read_options, start_run, write_results
from request_runs import AGENTIC
from scheduler_worker import SIDES, VLLM, Variant, Workload, is_there, serve

VARIANTS = {
    "plain": Variant(events=False, is_async=False),
    "events": Variant(events=True, is_async=False),
    "async": Variant(events=False, is_async=True),
}
PARTS = ("schedule", "update", "step")


def list_workloads(options: Options) -> dict[str, Workload]:
    """Return the workloads; `--scale` divides the numbers of requests, steps and blocks."""
    scale = options.scale
    return {
        "conversation": Workload(
            "conversation trace, chunked prefill, up to 128 running",
            "mooncake_conversation",
            options.requests // scale,
            128,
            8192,
            100_000 if scale == 1 else 20_000,
            1_000_000 if scale == 1 else 20,
        ),
        "decode": Workload(
            "256 sequences decoding", None, 256 // scale, 256, 8192, 20_000, options.decode_steps // scale
        ),
        "agentic": Workload(
            "agentic trace, up to 8 running",
            str(AGENTIC),
            options.agentic_requests // scale,
            8,
            8192,
            400_000,
            200 // scale,
        ),
    }


class Worker:
    """A process of one side."""

    def __init__(self, side: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, side), daemon=True)
        self.process.start()
        theirs.close()
        self.start: dict[str, float] = self.pipe.recv()

    def ask(self, *command: Any) -> Any:
        """Send a command and return the answer; meanwhile no other worker has anything to do."""
        self.pipe.send(command)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(("end",))
        self.process.join()


def run_round(
    workers: dict[str, Worker], workload: Workload, variant: Variant, segment: int, turn: int
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Run a workload once on every side, some steps at a time in alternating order.

    Returns:
        The times of each step by side, and the counts, which are equal on all sides. The first step of each
        segment is left out: it finds the caches full of another process's data.
    """
    order = list(workers)
    for side in in_turn(order, turn):
        workers[side].ask("new", workload, variant)
    times: dict[str, list[Any]] = {side: [] for side in workers}
    is_running = True
    while is_running:
        turn += 1
        for side in in_turn(order, turn - 1):
            steps = workers[side].ask("run", segment)
            times[side] += steps[1:]
            is_running = len(steps) == segment
    counts = {side: workers[side].ask("counts") for side in order}
    for one in counts.values():
        del one["mib"]
    if len({json.dumps(one) for one in counts.values()}) != 1:
        raise RuntimeError(f"the sides took different decisions: {counts}")
    return times, counts[order[0]]


def summarize(rounds: list[dict[str, list[Any]]], side: str) -> dict[str, Any]:
    """Return median, p99 and total of the steps in us; of each step its median over the rounds counts."""
    steps = zip(*[times[side] for times in rounds], strict=True)
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for repeated in steps:
        samples["schedule"].append(statistics.median(one[0] for one in repeated) / 1e3)
        samples["update"].append(statistics.median(one[1] for one in repeated) / 1e3)
        samples["step"].append(statistics.median(one[0] + one[1] for one in repeated) / 1e3)
    return {
        part: {
            "median": statistics.median(values),
            "p99": sorted(values)[int(len(values) * 0.99)],
            "total": sum(values),
        }
        for part, values in samples.items()
    }


def print_rows(figures: dict[str, dict[str, Any]]) -> None:
    names = ("median us", "p99 us", "total ms", "vLLM / this:", "median", "p99", "total")
    print(f"{'':26}{''.join(f'{name:>13}' for name in names)}")
    for part in PARTS:
        for side, figure in figures.items():
            one, theirs = figure[part], figures.get(VLLM, {}).get(part)
            line = f"{side:16}{part:10}{one['median']:>13.1f}{one['p99']:>13.1f}{one['total'] / 1e3:>13.1f}"
            if theirs:
                median, p99, total = (theirs[name] / one[name] for name in ("median", "p99", "total"))
                line += f"{median:>26.2f}{p99:>13.2f}{total:>13.2f}"
            print(line, flush=True)


def measure_starts(
    sides: list[str], num_blocks: int, num_starts: int
) -> tuple[dict[str, Any], dict[str, Worker]]:
    """Start each side in new processes, in turn.

    Returns:
        The medians of times, and of memory in MiB; and the last process of each side, for more.
    """
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    empty = Workload("start", None, 1, 8, 8192, num_blocks, 1)
    workers: dict[str, Worker] = {}
    for turn in range(num_starts):
        for side in sides if turn % 2 else sides[::-1]:
            if side in workers:
                workers.pop(side).end()
            workers[side] = worker = Worker(side)
            made = worker.ask("new", empty, VARIANTS["plain"])
            memory = worker.ask("counts")["mib"]
            samples[side].append({**worker.start, **made, "mib": memory - worker.start["import_mib"]})
    medians = {
        side: {name: statistics.median(one[name] for one in starts) for name in starts[0]}
        for side, starts in samples.items()
    }
    print(f"start with {num_blocks:,} blocks, median of {num_starts} processes")
    names = ("import vLLM ms", "register ms", "constructor ms", "both ms", "MiB added")
    print(f"{'':16}{''.join(f'{name:>16}' for name in names)}")
    for side, one in medians.items():
        both = one["register_ms"] + one["constructor_ms"]
        figures = f"{one['import_ms']:>16.0f}{one['register_ms']:>16.1f}{one['constructor_ms']:>16.1f}"
        print(f"{side:16}{figures}{both:>16.1f}{one['mib']:>16.1f}", flush=True)
    return medians, {side: workers[side] for side in sides}


def main() -> None:
    parser = make_parser(__doc__, seeded=False)
    parser.add_argument("--workload", action="append", help="conversation, decode or agentic; default: all")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all that exist")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each workload; medians count")
    parser.add_argument("--segment", type=int, default=20, help="steps that one side runs at a time")
    parser.add_argument("--requests", type=int, default=120, help="requests of the conversation trace")
    parser.add_argument("--agentic-requests", type=int, default=200, help="requests of the agentic trace")
    parser.add_argument("--decode-steps", type=int, default=512, help="tokens of each of 256 sequences")
    parser.add_argument("--starts", type=int, default=5, help="processes of each side for the start")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the sizes of all workloads")
    options = read_options(parser, rounds=1, starts=1, scale=16)
    try:
        import vllm.v1.core.block_pool  # noqa: F401, tests that it can be imported
    except ImportError as error:
        print(f"missing: vLLM ({error}); nothing to measure", file=sys.stderr)
        return
    sides = [side for side in options.side or SIDES if side == VLLM or is_there(side)]
    missing = [side for side in options.side or SIDES if side not in sides]
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
    provenance = start_run(options)
    workloads = list_workloads(options)
    starts, workers = measure_starts(sides, workloads["conversation"].num_blocks, options.starts)
    rows = []
    for name in options.workload or workloads:
        workload = workloads[name]
        for variant in options.variant or VARIANTS:
            rounds = []
            for turn in range(options.rounds):
                times, counts = run_round(workers, workload, VARIANTS[variant], options.segment, turn)
                rounds.append(times)
            hit_rate = counts["hit_tokens"] / counts["prompt_tokens"]
            print(
                f"\n{workload.title}; {variant}: {workload.num_requests} requests, {counts['steps']} steps, "
                f"{hit_rate:.1%} of {counts['prompt_tokens']:,} prompt tokens hit, "
                f"{counts['preemptions']} preemptions, {workload.num_blocks:,} blocks"
            )
            figures = {side: summarize(rounds, side) for side in sides}
            print_rows(figures)
            rows.append({"workload": name, "variant": variant, "counts": counts, "figures": figures})
    for worker in workers.values():
        worker.end()
    write_results(options, {"provenance": provenance, "starts": starts, "rows": rows})


if __name__ == "__main__":
    main()
