"""vLLM's scheduler with a `KVPoolConnector`, over a model runner that checks every block it reads.

The KV of a token is a checksum of all tokens up to it, of its layer and of its rank. In each step the runner
compares the KV of all tokens that the scheduled tokens attend to. A block with bytes of another prefix is
therefore found in the step that uses it.
"""

import json
import pickle
import zlib
from collections import Counter
from types import SimpleNamespace

import torch
from integrations.made_scheduler import MODEL
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_pool.integrations.vllm.connector.vllm_connector import KVPoolConnector

BLOCK_SIZE = 4
WINDOW = 3 * BLOCK_SIZE
CHUNK = 2 * BLOCK_SIZE
LAYERS = 2
TIMEOUT_S = 60


def make_spec(kind, num_heads=1):
    """Return the spec of a group: a page has a number of 64 bits per token and head.

    Only the first numbers of a page are used. "wide" is full attention with blocks twice as large; its pages
    are as large as those of other groups with two heads.
    """
    if kind == "mamba":
        return MambaSpec(
            block_size=BLOCK_SIZE, shapes=((BLOCK_SIZE,),), dtypes=(torch.int64,), mamba_cache_mode="all"
        )
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": num_heads, "head_size": 1, "dtype": torch.float32}
    if kind == "wide":
        shape |= {"block_size": 2 * BLOCK_SIZE, "num_kv_heads": 1}
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=WINDOW)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=CHUNK)
    return FullAttentionSpec(**shape)


def make_cache_config(kinds, num_blocks, is_block_outermost=False):
    """Return a configuration in which the groups share their bytes."""
    groups, tensors = [], []
    num_heads = 2 if "wide" in kinds else 1
    page = make_spec(kinds[0], num_heads).page_size_bytes
    for number, kind in enumerate(kinds):
        layers = [f"{kind}{number}.{layer}" for layer in range(LAYERS)]
        groups.append(KVCacheGroupSpec(layers, make_spec(kind, num_heads)))
        strides = (page, LAYERS * page) if is_block_outermost else (page * num_blocks, page)
        tensors.append(KVCacheTensor(LAYERS * page * num_blocks, layers, *strides))
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="BLNHC" if is_block_outermost else "LBNHC",
    )


def make_page_size(cache_config):
    return cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes


def make_config(folder, extra, *, num_blocks, events, policy, is_async, num_ranks=1, engine=0):
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=1024
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=32,
            max_model_len=1024,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            is_encoder_decoder=False,
            watermark=0.0,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_connector_module_path="kv_pool.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy=policy,
        ),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    config.parallel_config.world_size = num_ranks  # the executor is not vLLM's
    # As in the engine process of a dense model with data parallelism.
    config.parallel_config.data_parallel_index = engine
    config.parallel_config.reconfigure_for_independent_dp_rank()
    return config


class Rank:
    """A worker: the tensors of its KV cache, and its connector."""

    def __init__(self, config, cache_config, number):
        self.number = number
        self.memory = torch.zeros(cache_config.kv_cache_tensors[0].size, dtype=torch.int8)
        numbers = self.memory.view(torch.int64)
        self.caches = {}
        for placed in cache_config.kv_cache_tensors:
            for layer, name in enumerate(placed.layers):
                self.caches[name] = numbers.as_strided(
                    (cache_config.num_blocks, make_page_size(cache_config) // 8),
                    (placed.block_stride // 8, 1),
                    (placed.offset + layer * placed.layer_stride) // 8,
                )
        config.parallel_config.rank = number
        self.connector = KVPoolConnector(config, KVConnectorRole.WORKER, cache_config)
        self.connector.register_kv_caches(self.caches)

    def shake(self):
        """Return the metadata of the connector while it is that of the worker's process."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            return self.connector.get_handshake_metadata()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None


class CheckedEngine:
    """A scheduler with its connector, and the ranks.

    Args:
        kinds: the groups' kinds: full, window, chunk.
        extra: kv_connector_extra_config.
        shakes_hands: whether the engine collects the metadata of the workers' connectors at its start.
    """

    def __init__(
        self,
        folder,
        extra,
        kinds=("full",),
        *,
        num_blocks=24,
        events=False,
        policy="recompute",
        is_async=False,
        num_ranks=1,
        engine=0,
        is_block_outermost=False,
        shakes_hands=True,
    ):
        init_none_hash(sha256)
        self.config = make_config(
            folder,
            extra,
            num_blocks=num_blocks,
            events=events,
            policy=policy,
            is_async=is_async,
            num_ranks=num_ranks,
            engine=engine,
        )
        register_all_kvcache_specs(self.config)
        self.cache_config = make_cache_config(kinds, num_blocks, is_block_outermost)
        self.ranks = [Rank(self.config, self.cache_config, number) for number in range(num_ranks)]
        self.config.parallel_config.rank = 0
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.cache_config,
            block_size=max(group.kv_cache_spec.block_size for group in self.cache_config.kv_cache_groups),
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
        )
        self.aggregator = KVOutputAggregator(num_ranks)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.connector = self.scheduler.connector
        self.published = []
        self.scheduler.kv_event_publisher = self
        if shakes_hands:
            self.shake_hands()
        self.is_async = is_async
        self.counts = Counter()
        self.outputs = {}
        self.pending = []  # the steps that are computed, but whose output the scheduler has not seen

    def shake_hands(self):
        """Hand the metadata of the ranks to the scheduler's connector, as vLLM's engine does."""
        metadata = [pickle.loads(pickle.dumps({(0, rank.number): rank.shake()})) for rank in self.ranks]
        executor = SimpleNamespace(get_kv_connector_handshake_metadata=lambda: metadata)
        engine = SimpleNamespace(scheduler=self.scheduler, model_executor=executor)
        EngineCore._set_kv_connector_handshake_metadata(engine)

    def publish(self, batch):
        self.published += batch.events

    def shutdown(self):
        pass

    def add(self, name, prompt, max_tokens=1):
        sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, waits=True):
        """Run a step. With `waits`, its transfers end before its results are collected."""
        self.execute(self.scheduler.schedule(), waits)

    def execute(self, output, waits=True):
        """Run the step that the scheduler has planned."""
        sampled = self.compute(output)
        kv_output = self.transfer(output, waits)
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=kv_output,
        )
        self.pending.append((output, answer))
        if len(self.pending) > self.is_async:
            self.finish_step()

    def finish_step(self):
        output, answer = self.pending.pop(0)
        for outputs in self.scheduler.update_from_output(output, answer).values():
            for told in outputs.outputs:
                self.outputs.setdefault(told.request_id, []).extend(told.new_token_ids)
                if told.finish_reason is not None:
                    self.counts[f"finished: {told.finish_reason}"] += 1
                if told.prefill_stats is not None:
                    stats = told.prefill_stats
                    self.counts["external"] += stats.num_external_cached_tokens
                    self.counts["local"] += stats.num_local_cached_tokens

    def run(self, max_steps=2000):
        """Step until nothing is left to do, transfers included."""
        for _ in range(max_steps):
            if not (self.pending or self.scheduler.has_requests()):
                return
            self.step()
            if self.pending and not self.pending[-1][0].num_scheduled_tokens:
                while self.pending:
                    self.finish_step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.requests}")

    def generate(self, name, prompt, max_tokens=1):
        """Run a request alone; return (tokens from the device, tokens from tiers)."""
        before = Counter(self.counts)
        self.add(name, prompt, max_tokens)
        self.run()
        return self.counts["local"] - before["local"], self.counts["external"] - before["external"]

    # ---- the model -------------------------------------------------------------------------------

    def compute(self, output):
        """Check and write the KV of the scheduled tokens on all ranks; return the sampled tokens."""
        sampled = []
        for new in output.scheduled_new_reqs:
            self.counts["new"] += 1
            assert new.num_computed_tokens < len(new.prompt_token_ids)
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        more = output.scheduled_cached_reqs
        started.update(zip(more.req_ids, more.num_computed_tokens, strict=True))
        for name, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens = self.list_tokens(request)
            start, end = started[name], started[name] + num_scheduled
            table = self.scheduler.kv_cache_manager.get_block_ids(name)
            for rank in self.ranks:
                check_kv(rank, self.cache_config, table, tokens, start, name)
                write_kv(rank, self.cache_config, table, tokens, start, end)
            is_sampling = end >= len(tokens)
            if is_sampling and self.is_async:
                self.sampled.setdefault(name, []).append(make_token(tokens))
            sampled.append([make_token(tokens)] if is_sampling else [])
        return sampled

    @property
    def sampled(self):
        return self.__dict__.setdefault("_sampled", {})

    def list_tokens(self, request):
        """Return the request's tokens, with those that the scheduler has not been told yet."""
        tokens = list(request.all_token_ids)
        if not self.is_async:
            return tokens
        # The runner knows all sampled tokens at once.
        sampled = self.sampled.get(request.request_id, [])
        return [*request.prompt_token_ids, *sampled] if len(sampled) > request.num_output_tokens else tokens

    # ---- the connectors --------------------------------------------------------------------------

    def transfer(self, output, waits):
        """Call the hooks of each rank's connector; return their merged results."""
        answers = [call_connector(rank.connector, output, waits) for rank in self.ranks]
        if len(answers) == 1:
            return answers[0]
        answered = [
            ModelRunnerOutput(
                req_ids=[],
                req_id_to_index={},
                sampled_token_ids=[],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=answer,
            )
            for answer in answers
        ]
        return self.aggregator.aggregate(answered).kv_connector_output

    def close(self):
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def count_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def call_connector(connector, output, waits=True):
    """Call the hooks of a worker's connector in the order of vLLM's model runner.

    What is sent to the worker and back is pickled, as between vLLM's processes.
    """
    metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    if waits and connector.worker is not None:
        assert connector.worker.wait(TIMEOUT_S)
    results = connector.get_transfer_results(output.finished_req_ids)
    answer = KVConnectorOutput(
        finished_sending=results.finished_sending or None,
        finished_recving=results.finished_recving or None,
        failed_recving=results.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
    connector.clear_connector_metadata()
    return pickle.loads(pickle.dumps(answer))


def check_kv(rank, cache_config, table, tokens, end, name):
    """Check that the blocks that the token after the first `end` tokens attends to hold their KV."""
    for group, block_ids in zip(cache_config.kv_cache_groups, table, strict=True):
        first, block_size = count_skipped(group.kv_cache_spec, end), group.kv_cache_spec.block_size
        for layer_name in group.layer_names:
            expected = list_kv(tokens, layer_name, rank.number)
            cache = rank.caches[layer_name]
            for position in range(first, end):
                block_id = block_ids[position // block_size]
                assert block_id, f"{name}: no block for token {position} of {end} in {layer_name}"
                found = cache[block_id, position % block_size].item()
                assert found == expected[position], (
                    f"{name}: wrong KV of token {position} of {end}, block {block_id}, {layer_name}, "
                    f"rank {rank.number}"
                )


def write_kv(rank, cache_config, table, tokens, start, end):
    for group, block_ids in zip(cache_config.kv_cache_groups, table, strict=True):
        block_size = group.kv_cache_spec.block_size
        for layer_name in group.layer_names:
            kv = list_kv(tokens, layer_name, rank.number)
            for position in range(start, end):
                block_id = block_ids[position // block_size]
                if block_id:
                    rank.caches[layer_name][block_id, position % block_size] = kv[position]


def list_kv(tokens, layer_name, rank):
    """Return the KV of each token in a layer of a rank."""
    found = []
    value = zlib.crc32(f"{layer_name} {rank}".encode())
    for token in tokens:
        value = zlib.crc32(token.to_bytes(4, "big"), value)
        found.append(value)
    return found


def make_token(tokens):
    return zlib.crc32(repr(tokens).encode()) % 1000


def count_skipped(spec, num_tokens):
    if isinstance(spec, SlidingWindowSpec):
        return max(0, num_tokens - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_tokens - num_tokens % spec.attention_chunk_size
    return 0


def block_bytes(num_blocks, num_ranks=1):
    """Return the bytes of a number of blocks of each rank."""
    return num_blocks * LAYERS * make_spec("full").page_size_bytes * num_ranks


def list_prompts(rng, num_families=4, length=60):
    """Return functions that make prompts with shared prefixes."""
    families = [[rng.randrange(1000) for _ in range(length)] for _ in range(num_families)]

    def make_prompt():
        shared = rng.choice(families)[: rng.randrange(4, length)]
        return [*shared, *(rng.randrange(1000) for _ in range(rng.randrange(1, 12)))]

    return make_prompt


def live(engine, rng, num_requests, max_tokens=12, abort_share=0.1, waits=None):
    """Run requests that share prefixes, aborting some; return the numbers of the engine's counts."""
    make_prompt = list_prompts(rng)
    waiting = [(f"r{number}", make_prompt()) for number in range(num_requests)]
    while waiting or engine.scheduler.has_unfinished_requests():
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.add(*waiting.pop(0), max_tokens=rng.randrange(1, max_tokens))
        if engine.scheduler.requests and rng.random() < abort_share:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        engine.step(rng.random() < 0.5 if waits is None else waits)
    engine.run()
    return engine.counts
