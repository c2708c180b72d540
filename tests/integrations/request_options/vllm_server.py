"""vLLM's OpenAI-compatible server on a fake model; answers HTTP requests given as JSON.

    VLLM_PLUGINS=kv_pool KV_POOL_VLLM=manager python vllm_server.py FOLDER [--kv-transfer-config ...]

FOLDER/requests.json lists steps: ["post", path, body], or ["wait", seconds]. Prints the answers of the posts
as JSON: status and body. The engine runs in its own process; only its executor is not vLLM's. It samples the
number of computed tokens.
"""

import asyncio
import json
import sys
from pathlib import Path

import httpx
from fake_executor import FakeExecutor
from made_scheduler import MODEL
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


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
