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

import msgspec
import torch
import vllm.logger
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
NUM_BLOCKS = 60
NUM_REQUESTS = 40
MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
}


class KeptEvents:
    """A replacement for the publisher that keeps the events."""

    def __init__(self):
        self.encoded = []

    def publish(self, batch):
        self.encoded += [msgspec.json.encode(event).decode() for event in batch.events]

    def shutdown(self):
        pass


def make_scheduler(folder):
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=1024
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=1024,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
            watermark=0.0,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        observability_config=ObservabilityConfig(kv_cache_metrics=True, kv_cache_metrics_sample=1.0),
    )
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=64)),
    ]
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    register_all_kvcache_specs(config)
    if hasattr(vllm.logger, "configure_logging"):  # vLLM 0.30 configures its logging on import
        vllm.logger.configure_logging(config.logging_config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def make_requests(rng):
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    shared = [[rng.randrange(50_000) for _ in range(200)] for _ in range(3)]
    for number in range(NUM_REQUESTS):
        prompt = rng.choice(shared)[: rng.randrange(20, 200)]
        prompt = prompt + [rng.randrange(50_000) for _ in range(rng.randrange(1, 60))]
        sampling = SamplingParams(ignore_eos=True, max_tokens=rng.randrange(1, 80))
        sampling.update_from_generation_config({}, 1)
        yield Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
        )


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
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = scheduler.requests[name]
            is_prefill = request.num_computed_tokens < request.num_tokens
            tokens.append([] if is_prefill else [len(steps) * 100 + int(name)])
        answered = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
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
    scheduler = make_scheduler(Path(sys.argv[1]))
    told = schedule_all(scheduler, requests, rng)
    told["pool"] = type(scheduler.kv_cache_manager.block_pool).__module__
    print(json.dumps(told))


if __name__ == "__main__":
    main()
