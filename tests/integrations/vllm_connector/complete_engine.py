"""A complete vLLM with the connector on a fake model; prints the cached tokens of its rounds as JSON.

    python complete_engine.py FOLDER

vLLM itself makes the configuration of the KV cache, loads the connector by its name, and runs the engine.
Only the executor is not vLLM's: it has one rank, whose KV it checks as `checked_engine` does.
"""

import json
import sys
from concurrent.futures import Future
from pathlib import Path

from integrations.made_scheduler import MODEL
from integrations.vllm_connector.checked_engine import (
    BLOCK_SIZE,
    Rank,
    call_connector,
    check_kv,
    make_spec,
    make_token,
    write_kv,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

NUM_BLOCKS = 100
SPECS = {
    "full.0": make_spec("full"),
    "full.1": make_spec("full"),
    "window.0": make_spec("window"),
    "window.1": make_spec("window"),
}
ANSWERS = {
    "get_kv_cache_spec": SPECS,
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": NUM_BLOCKS * 2 * make_spec("full").page_size_bytes,
    "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
    "get_supported_tasks": ("generate",),
}


class OneRank(Executor):
    """An executor in the engine's process with one checked rank."""

    def _init_executor(self):
        self.rank = None
        self.tokens, self.tables = {}, {}

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        if method == "initialize_from_config":
            (self.cache_config,) = args[0]
            self.rank = Rank(self.vllm_config, self.cache_config, 0)
        return [ANSWERS.get(method) if isinstance(method, str) else None]

    def check_health(self):
        pass

    def shutdown(self):
        self.rank.connector.shutdown()

    def execute_model(self, output, non_block=False):
        started = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = [list(block_ids) for block_ids in new.block_ids]
            started[new.req_id] = new.num_computed_tokens
        more = output.scheduled_cached_reqs
        assert not more.resumed_req_ids
        for name, block_ids, num_computed in zip(
            more.req_ids, more.new_block_ids, more.num_computed_tokens, strict=True
        ):
            started[name] = num_computed
            for table, added in zip(self.tables[name], block_ids or (), strict=bool(block_ids)):
                table += added
        sampled = []
        for name, num_scheduled in output.num_scheduled_tokens.items():
            tokens, table, start = self.tokens[name], self.tables[name], started[name]
            check_kv(self.rank, self.cache_config, table, tokens, start, name)
            write_kv(self.rank, self.cache_config, table, tokens, start, start + num_scheduled)
            sampled.append([make_token(tokens)] if start + num_scheduled >= len(tokens) else [])
            tokens += sampled[-1]
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=call_connector(self.rank.connector, output, waits=False),
        )
        if not non_block:
            return answer
        future = Future()
        future.set_result(answer)
        return future


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    folder = Path(sys.argv[1])
    (folder / "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=OneRank,
        max_model_len=64,
        max_num_seqs=2,
        block_size=BLOCK_SIZE,
        dtype="float32",
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_connector_module_path="kv_pool.integrations.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "host_bytes": "64KiB",
                "disk_bytes": "1MiB",
                "disk_folder": str(folder / "disk"),
            },
        ),
    )
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [number] * 30 + [7] * 3} for number in range(1, 13)]
    cached = []
    while len(cached) < 10 and not (cached and all(cached[-1])):  # a busy machine stores later, or not at all
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        cached.append([output.num_cached_tokens for output in outputs])
    print(json.dumps({"cached": cached, "reset": engine.reset_prefix_cache(reset_connector=True)}))


if __name__ == "__main__":
    main()
