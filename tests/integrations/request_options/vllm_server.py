"""vLLM's OpenAI-compatible server on a fake model; answers HTTP requests given as JSON.

    VLLM_PLUGINS=kv_pool KV_POOL_VLLM=manager python vllm_server.py FOLDER [--kv-transfer-config ...]

FOLDER/requests.json lists steps: ["post", path, body], or ["wait", seconds]. Prints the answers of the posts
as JSON: status and body. The engine runs in its own process; only its executor is not vLLM's. It samples the
number of computed tokens.
"""

import asyncio
import json
import sys
from concurrent.futures import Future
from pathlib import Path

import httpx
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

BLOCK_SIZE = 16
NUM_BLOCKS = 40
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
ANSWERS = {
    "get_kv_cache_spec": {"layer": SPEC},
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": NUM_BLOCKS * SPEC.page_size_bytes,
    "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
    "get_supported_tasks": ("generate",),
}


class FakeExecutor(Executor):
    """Computes nothing, in no time."""

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


async def serve(folder, options):
    """Start the server, make the requests, return the answers."""
    parser = make_arg_parser(FlexibleArgumentParser())
    settings = "--skip-tokenizer-init --max-model-len 256 --dtype float32 --served-model-name fake"
    settings += " --enable-prompt-tokens-details --no-async-scheduling"
    args = parser.parse_args(["--model", str(folder), *settings.split(), *options])
    validate_parsed_serve_args(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.distributed_executor_backend = FakeExecutor
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        app = build_app(args, ("generate",), engine.model_config)
        await init_app_state(engine, app.state, args, ("generate",))
        answers = []
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            for step, *arguments in json.loads((folder / "requests.json").read_text()):
                if step == "wait":
                    await asyncio.sleep(arguments[0])
                    continue
                path, body = arguments
                answer = await client.post(path, json=body)
                answers.append([answer.status_code, answer.json()])
        return answers
    finally:
        engine.shutdown()


def main():
    folder = Path(sys.argv[1])
    (folder / "config.json").write_text(json.dumps(MODEL))
    print(json.dumps(asyncio.run(serve(folder, sys.argv[2:]))))


if __name__ == "__main__":
    main()
