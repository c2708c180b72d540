"""vLLM's scheduler, with or without the plugin; prints all its decisions as one line of JSON.

    VLLM_PLUGINS=kv_pool python vllm_schedule.py FOLDER

As in an engine process, the scheduler is imported, then the plugins are loaded, then it is created. The model
runner is a fake. The model's configuration is written to FOLDER. 40 requests share prefixes; there is a full
attention group and a sliding window group, and the pool is small enough to evict and to preempt.
"""

import json
import random
import sys
from pathlib import Path

import torch
import vllm.logger
from made_scheduler import KeptEvents, make_answer, make_config, make_hasher, make_request, make_scheduler
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

BLOCK_SIZE = 16
NUM_BLOCKS = 60
NUM_REQUESTS = 40


def make_small_scheduler(folder):
    config = make_config(
        folder,
        max_model_len=1024,
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 256},
        cache={"block_size": BLOCK_SIZE, "enable_prefix_caching": True},
    )
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=64)),
    ]
    if hasattr(vllm.logger, "configure_logging"):  # vLLM 0.30 configures its logging on import
        vllm.logger.configure_logging(config.logging_config)
    return make_scheduler(config, groups, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def make_requests(rng):
    hasher = make_hasher(BLOCK_SIZE)
    shared = [[rng.randrange(50_000) for _ in range(200)] for _ in range(3)]
    for number in range(NUM_REQUESTS):
        prompt = rng.choice(shared)[: rng.randrange(20, 200)]
        prompt = prompt + [rng.randrange(50_000) for _ in range(rng.randrange(1, 60))]
        sampling = {"ignore_eos": True, "max_tokens": rng.randrange(1, 80)}
        yield make_request(str(number), prompt, hasher, sampling)


def schedule_all(scheduler, requests, rng):
    """Step until no request is left; return the decisions of each step."""
    scheduler.kv_event_publisher = events = KeptEvents()
    waiting = list(requests)
    steps = []
    while waiting or scheduler.has_unfinished_requests():
        for _ in range(rng.randrange(3)):
            if waiting:
                scheduler.add_request(waiting.pop(0))
        output = scheduler.schedule()
        sampled = {}
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            is_prefill = request.num_computed_tokens < request.num_tokens
            sampled[name] = [] if is_prefill else [len(steps) * 100 + int(name)]
        answered = scheduler.update_from_output(output, make_answer(sampled))
        steps.append(
            {
                "scheduled": output.num_scheduled_tokens,
                "new": [
                    [new.req_id, new.block_ids, new.num_computed_tokens] for new in output.scheduled_new_reqs
                ],
                "more": [
                    output.scheduled_cached_reqs.req_ids,
                    output.scheduled_cached_reqs.new_block_ids,
                    output.scheduled_cached_reqs.num_computed_tokens,
                ],
                "preempted": sorted(output.preempted_req_ids or ()),
                "usage": scheduler.kv_cache_manager.usage,
                "samples": [
                    [type(sample).__module__, len(sample.reuse_gaps_seconds)]
                    for outputs in answered.values()
                    if outputs.scheduler_stats is not None
                    for sample in outputs.scheduler_stats.kv_cache_eviction_events
                ],
            }
        )
    reset = scheduler.reset_prefix_cache()
    events.publish(type("Batch", (), {"events": scheduler.kv_cache_manager.take_events()}))
    return {"steps": steps, "events": events.encoded, "reset": reset}


def main():
    load_general_plugins()
    rng = random.Random(0)
    requests = list(make_requests(rng))
    scheduler = make_small_scheduler(Path(sys.argv[1]))
    told = schedule_all(scheduler, requests, rng)
    told["pool"] = type(scheduler.kv_cache_manager.block_pool).__module__
    print(json.dumps(told))


if __name__ == "__main__":
    main()
