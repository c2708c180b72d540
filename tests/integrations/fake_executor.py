"""`FakeExecutor`: an executor of vLLM without a model; it samples the number of computed tokens."""

from concurrent.futures import Future

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

BLOCK_SIZE = 16
NUM_BLOCKS = 40
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)

# The engine's calls to its workers and the required answers; all other calls return None.
ANSWERS = {
    "get_kv_cache_spec": {"layer": SPEC},
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": NUM_BLOCKS * SPEC.page_size_bytes,
    "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
    "get_supported_tasks": ("generate",),
}


class FakeExecutor(Executor):
    """Runs in the engine's process and computes nothing."""

    def _init_executor(self):
        self.num_tokens = {}  # request: computed tokens, prompt

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        return [ANSWERS.get(method) if isinstance(method, str) else None]

    def check_health(self):
        pass

    def execute_model(self, output, non_block=False):
        steps = output.num_scheduled_tokens
        more = output.scheduled_cached_reqs
        for request in output.scheduled_new_reqs:
            self.num_tokens[request.req_id] = [request.num_computed_tokens, len(request.prompt_token_ids)]
        for name, num_computed in zip(more.req_ids, more.num_computed_tokens, strict=True):
            self.num_tokens[name][0] = num_computed
        sampled = []
        for name, num_scheduled in steps.items():
            num_computed, num_prompt = self.num_tokens[name]
            end = num_computed + num_scheduled
            sampled.append([end] if end >= num_prompt else [])
        answer = ModelRunnerOutput(
            req_ids=list(steps),
            req_id_to_index={name: index for index, name in enumerate(steps)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if not non_block:
            return answer
        future = Future()
        future.set_result(answer)
        return future
