"""vLLM's scheduler without a model: its configuration, its requests, and answers of a fake runner."""

import json

import msgspec
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}


class KeptEvents:
    """A replacement for the publisher that keeps the events."""

    def __init__(self):
        self.encoded = []

    def publish(self, batch):
        self.encoded += [msgspec.json.encode(event).decode() for event in batch.events]

    def take(self):
        """Return the events since the last call."""
        encoded, self.encoded = self.encoded, []
        return encoded

    def shutdown(self):
        pass


def make_config(folder, *, max_model_len, scheduler, cache, events=True, metrics=True):
    """Return a configuration of vLLM. The model's is written to `folder`.

    `scheduler` and `cache` are options of vLLM's `SchedulerConfig` and `CacheConfig`.
    """
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=max_model_len
    )
    options = {
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "is_encoder_decoder": False,
        "watermark": 0.0,
        **scheduler,
    }
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, **options),
        cache_config=CacheConfig(**cache),
        parallel_config=ParallelConfig(),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
        observability_config=ObservabilityConfig(kv_cache_metrics=metrics, kv_cache_metrics_sample=1.0),
    )
    # vLLM disables it on machines without an accelerator.
    config.scheduler_config.async_scheduling = options["async_scheduling"]
    return config


def make_scheduler(config, groups, *, num_blocks, block_size, hash_block_size=None, retention_interval=None):
    """Return vLLM's `Scheduler`, or its `AsyncScheduler` if `config` requires it, over these groups."""
    config.cache_config.num_gpu_blocks = num_blocks
    register_all_kvcache_specs(config)
    is_async = config.scheduler_config.async_scheduling
    scheduler_class = async_scheduler.AsyncScheduler if is_async else scheduler.Scheduler
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention_interval,
        ),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def make_hasher(block_size, algorithm="sha256", num_lookahead_tokens=0):
    """Return the function that hashes a request's blocks."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    options = [num_lookahead_tokens] if num_lookahead_tokens else []  # unknown until vLLM 0.32
    return get_request_block_hasher(block_size, function, *options)


def make_request(request_id, tokens, hasher, sampling, *, eos_token_id=1, **options):
    """Return a request. `sampling` are options of vLLM's `SamplingParams`, the others those of `Request`."""
    params = SamplingParams(**sampling)
    params.update_from_generation_config({}, eos_token_id)
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
        **options,
    )


def make_answer(sampled, **options):
    """Return the model runner's answer with these sampled tokens by request."""
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: index for index, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        **options,
    )
