"""Measure how much of the gap between LRU and the optimum cache policies close. See benchmarks/README.md."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from measuring import make_parser, read_options, start_run, write_results
from request_runs import AGENTIC

from kv_pool.core.policy_names import list_policies
from kv_pool.lab import ReplaySettings, measure_curves, run_replay
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_writer import open_trace_writer
from kv_pool.lab.workloads.agent import AgentSettings, generate_agent
from kv_pool.lab.workloads.chat import ChatSettings, generate_chat
from kv_pool.lab.workloads.distributions import Distribution
from kv_pool.lab.workloads.rag import RAGSettings, generate_rag
from kv_pool.lab.workloads.workload import GeneratedRequest

SHARED = {"conversation": "mooncake_conversation", "agentic": str(AGENTIC)}
CAPACITIES = (3_000, 10_000, 30_000)
NUM_FOLDS = 2
draw = Distribution.parse


def generate(num_requests: int, seed: int) -> dict[str, Iterator[GeneratedRequest]]:
    """Return the generated workloads; a third of the requests for agents, whose prompts are long."""
    chat: dict[str, Any] = {"num_requests": num_requests}
    few: dict[str, Any] = {"num_requests": max(1, num_requests // 3)}
    return {
        "chat 512": generate_chat(ChatSettings(**chat, seed=seed + 11, block_size=512)),
        "chat 512 busy": generate_chat(
            ChatSettings(
                **chat,
                seed=seed + 12,
                block_size=512,
                turns=draw("geometric:5"),
                think_time=draw("lognormal:60:1.2"),
                system_prompts=20,
                system_tokens=draw("lognormal:2000:0.8"),
            )
        ),
        "chat 64 short": generate_chat(
            ChatSettings(
                **chat,
                seed=seed + 13,
                first_tokens=draw("lognormal:400:1.2"),
                message_tokens=draw("lognormal:60:1.2"),
                turns=draw("geometric:4"),
                sessions_per_s=0.7,
            )
        ),
        "agent 64": generate_agent(AgentSettings(**few, seed=seed + 15)),
        "agent 512 tools": generate_agent(
            AgentSettings(
                **chat,
                seed=seed + 20,
                block_size=512,
                system_prompts=40,
                system_skew=0.9,
                system_tokens=draw("lognormal:5000:0.6"),
                task_tokens=draw("lognormal:2000:1.0"),
                turns=draw("geometric:1.5"),
                steps=draw("geometric:2"),
                sessions_per_s=1.0,
                max_tokens=120_000,
            )
        ),
        "RAG 64": generate_rag(RAGSettings(**chat, seed=seed + 17)),
        "RAG 64 turns": generate_rag(
            RAGSettings(
                **chat, seed=seed + 18, turns=draw("geometric:3"), documents=2000, retrieved=draw("fixed:3")
            )
        ),
    }


def write_folds(trace: str, folder: Path, name: str, limit: int | None, seed: int) -> dict[str, str]:
    """Deal the sessions of a trace to files; without session ids, the prompts by their second block."""
    paths = {f"{name} fold {fold + 1}": str(folder / f"{name}-{fold}.jsonl") for fold in range(NUM_FOLDS)}
    for fold, path in enumerate(paths.values()):
        with open_trace_writer(path) as write:
            for request in islice(Trace(trace), limit):
                ids = request.hash_ids or []
                session = request.session_id or str(ids[:2])
                if crc32(f"{session}{seed or ''}".encode()) % NUM_FOLDS == fold:
                    write(
                        {
                            "timestamp": int(request.arrival_ms),
                            "input_length": request.input_length,
                            "output_length": request.output_length,
                            "hash_ids": ids,
                        }
                    )
    return paths


def write_traces(folder: Path, num_requests: int, limit: int | None, seed: int) -> dict[str, tuple[str, int]]:
    """Write folds and generated workloads. Return paths and capacity divisors of all traces by name."""
    traces = {name: (path, 1) for name, path in SHARED.items()}
    for name, path in SHARED.items():
        folds = write_folds(path, folder, name, limit, seed)
        traces |= {fold: (written, NUM_FOLDS) for fold, written in folds.items()}
    for name, requests in generate(num_requests, seed).items():
        path = str(folder / f"{name}.jsonl")
        with open_trace_writer(path) as write:
            for request in requests:
                write(request)
        traces[name] = (path, 1)
    return traces


@dataclass(frozen=True)
class Task:
    """One trace, replayed with some policies at one capacity."""

    name: str
    trace: str
    num_blocks: int
    policies: tuple[str, ...]
    limit: int | None


def measure(task: Task) -> list[dict[str, Any]]:
    """Return a row for each policy: hit blocks, and those of LRU and the optimum."""
    settings = ReplaySettings(task.trace, task.num_blocks, limit=task.limit)
    point = measure_curves(settings, [task.num_blocks]).points[0]
    lru, optimum = point.lru.blocks_hit, point.optimum.blocks_hit
    rows = []
    for policy in task.policies:
        report = run_replay(replace(settings, policy=policy))
        gap = optimum - lru
        rows.append(
            {
                "trace": task.name,
                "blocks": task.num_blocks,
                "policy": policy,
                "blocks_looked_up": report.blocks_looked_up,
                "hits": report.blocks_hit,
                "hits_lru": lru,
                "hits_optimum": optimum,
                "gap_closed": (report.blocks_hit - lru) / gap if gap else None,
                "over_lru": (report.blocks_hit - lru) / report.blocks_looked_up,
            }
        )
    return rows


def print_row(row: dict[str, Any]) -> None:
    closed = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.1%}"
    rates = [row[key] / row["blocks_looked_up"] for key in ("hits_lru", "hits", "hits_optimum")]
    cells = "".join(f"{rate:>9.2%}" for rate in rates)
    name = f"{row['trace']:22}{row['blocks']:>7,} {row['policy']:16}"
    print(f"{name}{cells}{closed:>9}{100 * row['over_lru']:>+8.2f}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--policies", default=",".join(list_policies()), help="separated by commas")
    parser.add_argument("--on", help="names of traces, separated by commas; default: all")
    parser.add_argument("--requests", type=int, default=12_000, help="requests of a generated workload")
    parser.add_argument("--limit", type=int, help="maximum number of requests per trace; for a smoke test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = read_options(parser)
    policies = tuple(options.policies.split(","))
    provenance = start_run(options)
    num_requests = min(options.requests, options.limit or options.requests)
    rows: list[dict[str, Any]] = []
    print(
        f"{'trace':22}{'blocks':>7} {'policy':16}{'LRU':>9}{'policy':>9}{'optimum':>9}{'gap':>9}{'points':>8}"
    )
    context = get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs, mp_context=context) as executor:
        traces = write_traces(Path(folder), num_requests, options.limit, options.seed)
        names = options.on.split(",") if options.on else list(traces)
        tasks = [
            Task(name, traces[name][0], num_blocks // traces[name][1], policies, options.limit)
            for name in names
            for num_blocks in CAPACITIES
        ]
        for measured in executor.map(measure, tasks):
            for row in measured:
                print_row(row)
            rows += measured
            write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
