"""A complete vLLM with the connector on a fake model; prints the cached tokens of its rounds as JSON.

    python complete_engine.py FOLDER [RANKS]

vLLM itself makes the configuration of the KV cache, loads the connector by its name, and runs the engine. One
rank is in the process of the engine; only the executor is not vLLM's. Two ranks are worker processes of
tensor parallelism; only the worker is not vLLM's. Each rank checks its KV as `checked_engine` does.
"""

import json
import sys
from concurrent.futures import Future
from pathlib import Path

from integrations.made_scheduler import MODEL
from integrations.start_method import keep_start_method
from integrations.vllm_connector.checked_engine import BLOCK_SIZE
from integrations.vllm_connector.checked_model import ANSWERS, CheckedModel
from vllm.v1.executor.abstract import Executor


class OneRank(Executor):
    """An executor in the engine's process with one checked rank."""

    def _init_executor(self):
        self.model = None

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        if method == "initialize_from_config":
            (cache_config,) = args[0]
            self.model = CheckedModel(self.vllm_config, cache_config, 0)
        return [ANSWERS.get(method) if isinstance(method, str) else None]

    def check_health(self):
        pass

    def shutdown(self):
        self.model.rank.connector.shutdown()

    def execute_model(self, output, non_block=False):
        answer = self.model.execute(output)
        if not non_block:
            return answer
        future = Future()
        future.set_result(answer)
        return future


# How vLLM is told about the ranks, by their number.
RANKS = {
    1: {"distributed_executor_backend": OneRank},
    2: {
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": 2,
        "worker_cls": "integrations.vllm_connector.checked_worker.CheckedWorker",
    },
}


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    keep_start_method()
    folder, num_ranks = Path(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])
    (folder / "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        **RANKS[num_ranks],
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
                "host_bytes": f"{64 * num_ranks}KiB",
                "disk_bytes": f"{num_ranks}MiB",
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
    seen = {"cached": cached, "reset": engine.reset_prefix_cache(reset_connector=True)}
    if num_ranks > 1:
        seen["workers"] = engine.collective_rpc("describe_kv_pool")
        seen["folders"] = sorted(found.name.partition("-")[2] for found in (folder / "disk").iterdir())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
