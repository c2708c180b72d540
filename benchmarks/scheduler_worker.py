"""A process with vLLM's scheduler over one side's classes; it runs steps for `bench_vllm_scheduler.py`.

The side's classes are installed by the plugin, after vLLM's scheduler was imported, as in an engine process.
"""

import gc
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import gc_off, resident_bytes
from request_runs import BLOCK_SIZE, make_vllm_config, make_vllm_hasher, make_vllm_request

from kv_pool.lab.trace import Trace, TraceRequest, find_trace

VLLM, POOL, MANAGER = "vLLM", "level pool", "level manager"
SIDES = (VLLM, POOL, MANAGER)
LEVELS = {POOL: "pool", MANAGER: "manager"}
MAX_MODEL_LEN = 1_000_000
MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
}

# CPU time of this thread; time used by other processes does not count.
now = time.thread_time_ns


@dataclass
class Workload:
    """Requests for one scheduler. `trace` None: `num_requests` sequences that only decode.

    Steps are measured from the first one; with sequences that only decode, after their prompts.
    """

    title: str
    trace: str | None
    num_requests: int
    max_running: int
    max_batched_tokens: int
    num_blocks: int
    max_output: int


@dataclass
class Variant:
    """Options of the scheduler."""

    events: bool
    is_async: bool


def is_there(side: str) -> bool:
    """Return whether this side's classes exist."""
    name = "manager_classes" if side == MANAGER else "plugin"
    return find_spec(f"kv_pool.integrations.vllm.{name}") is not None


class Engine:
    """vLLM's scheduler with a fake model runner, and the times of its steps."""

    def __init__(self, side: str, workload: Workload, variant: Variant, folder: Path) -> None:
        self.workload = workload
        self.config = self._make_config(variant, folder)
        self.is_async = variant.is_async
        self.requests = list(self._make_requests())
        gc.collect()
        started = now()
        self.scheduler = self._make_scheduler()
        self.constructor_ms = (now() - started) / 1e6
        manager = type(self.scheduler.kv_cache_manager).__module__.partition(".")[0]
        pool = type(self.scheduler.kv_cache_manager.block_pool).__module__.partition(".")[0]
        expected = {VLLM: ("vllm", "vllm"), POOL: ("vllm", "kv_pool"), MANAGER: ("kv_pool", "kv_pool")}
        if (manager, pool) != expected[side]:
            raise RuntimeError(f"{side}: the manager is {manager}'s and the pool {pool}'s")
        self.unanswered: list[tuple[Any, dict[str, list[int]]]] = []
        self.digest = 0
        self.num_steps = self.num_hit_tokens = self.num_prompt_tokens = self.num_preemptions = 0
        for request in self.requests:
            self.scheduler.add_request(request)
        if workload.trace is None:
            while self.scheduler.waiting or any(request.is_prefill_chunk for request in self.requests):
                self.step()
        self.freeze()

    def freeze(self) -> None:
        """Leave everything that exists to no later collection, as vLLM's engine does after its start."""
        gc.collect()
        gc.freeze()

    def _make_config(self, variant: Variant, folder: Path) -> Any:
        from vllm.config import (
            CacheConfig,
            KVEventsConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )

        (folder / "config.json").write_text(json.dumps(MODEL))
        workload = self.workload
        model = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=MAX_MODEL_LEN
        )
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=workload.max_running,
                max_num_batched_tokens=workload.max_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                async_scheduling=variant.is_async,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            parallel_config=ParallelConfig(),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=variant.events, publisher="null"),
        )

    def _make_scheduler(self) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        num_blocks = self.workload.num_blocks
        self.config.cache_config.num_gpu_blocks = num_blocks
        register_all_kvcache_specs(self.config)
        cache_config = make_vllm_config(num_blocks, BLOCK_SIZE)
        cache_config.prefix_cache_retention_interval = 0
        return (AsyncScheduler if self.is_async else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            block_size=BLOCK_SIZE,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
        )

    def _make_requests(self) -> Iterator[Any]:
        hasher = make_vllm_hasher("sha256")
        for number, (tokens, num_output) in enumerate(self._list_prompts()):
            yield make_vllm_request(str(number), tokens, num_output, hasher)

    def _list_prompts(self) -> Iterator[tuple[list[int], int]]:
        """Yield the tokens of each prompt and the number of tokens to generate."""
        workload = self.workload
        if workload.trace is None:
            for number in range(workload.num_requests):
                # Up to 15 tokens more: at each step another sixteenth of the sequences needs a block.
                yield [number + 1] * (512 + number % BLOCK_SIZE), workload.max_output
            return
        trace = Trace(find_trace(workload.trace))
        for number, traced in enumerate(trace):
            if number == workload.num_requests:
                return
            num_output = min(max(1, traced.output_length), workload.max_output)
            yield list_tokens(traced, trace.block_size or 1), num_output

    # ---- steps ---------------------------------------------------------------------------------

    def run(self, max_steps: int) -> list[tuple[int, int, int]]:
        """Run up to `max_steps` steps; return the times of the calls in ns, and the scheduled requests."""
        times: list[tuple[int, int, int]] = []
        with gc_off():
            while len(times) < max_steps and self.scheduler.has_unfinished_requests():
                times.append(self.step())
        return times

    def step(self) -> tuple[int, int, int]:
        started = now()
        output = self.scheduler.schedule()
        schedule_ns = now() - started
        self.num_steps += 1
        self._note(output)
        requests = self.scheduler.requests
        sampled = {
            name: [] if requests[name].is_prefill_chunk else [self.num_steps]
            for name in output.num_scheduled_tokens
        }
        self.unanswered.append((output, sampled))
        update_ns = 0
        if len(self.unanswered) > (1 if self.is_async and sampled else 0):
            update_ns = self._answer()
        return schedule_ns, update_ns, len(sampled)

    def _answer(self) -> int:
        from vllm.v1.outputs import ModelRunnerOutput

        output, sampled = self.unanswered.pop(0)
        answer = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        started = now()
        self.scheduler.update_from_output(output, answer)
        return now() - started

    def _note(self, output: Any) -> None:
        """Add a step's decisions to the digest and to the counts."""
        new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs]
        more = output.scheduled_cached_reqs.new_block_ids
        text = repr((output.num_scheduled_tokens, new, more))
        self.digest = zlib.crc32(text.encode(), self.digest)
        self.num_preemptions += len(output.preempted_req_ids or ())
        for one in output.scheduled_new_reqs:
            self.num_hit_tokens += one.num_computed_tokens
            self.num_prompt_tokens += len(one.prompt_token_ids)


def list_tokens(traced: TraceRequest, block_size: int) -> list[int]:
    """Return a prompt whose blocks are equal where the trace's ids are."""
    tokens: list[int] = []
    for hash_id in traced.hash_ids or ():
        tokens += [hash_id + 1] * block_size
    tail = [traced.line + 10_000_000] * (traced.input_length - len(tokens))
    return (tokens + tail)[: traced.input_length]


def serve(pipe: Connection, side: str) -> None:
    """Answer the commands of the parent process: `new`, `run`, `counts`, `end`."""
    os.environ |= {
        "VLLM_PLUGINS": "kv_pool",
        "KV_POOL_VLLM": LEVELS.get(side, ""),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    import logging

    logging.disable(logging.WARNING)
    started = now()
    import torch  # noqa: F401, so that its time and memory do not count as those of a side
    from vllm.v1.core.sched import async_scheduler  # noqa: F401, imported before the plugin, as in an engine
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: F401

    import_ms = (now() - started) / 1e6
    import_mib = resident_bytes() / 2**20
    started = now()
    if side != VLLM:
        from kv_pool.integrations.vllm import register

        register()
    pipe.send({"import_ms": import_ms, "register_ms": (now() - started) / 1e6, "import_mib": import_mib})
    engine: Engine | None = None
    with TemporaryDirectory() as folder:
        while (command := pipe.recv())[0] != "end":
            if command[0] == "new":
                engine = None
                gc.unfreeze()
                gc.collect()
                engine = Engine(side, command[1], command[2], Path(folder))
                pipe.send({"constructor_ms": engine.constructor_ms})
                continue
            if engine is None:
                raise RuntimeError(f"{command[0]} before new")
            if command[0] == "run":
                pipe.send(engine.run(command[1]))
            elif command[0] == "counts":
                pipe.send(
                    {
                        "digest": engine.digest,
                        "steps": engine.num_steps,
                        "hit_tokens": engine.num_hit_tokens,
                        "prompt_tokens": engine.num_prompt_tokens,
                        "preemptions": engine.num_preemptions,
                        "mib": resident_bytes() / 2**20,
                    }
                )
