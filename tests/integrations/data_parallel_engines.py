"""vLLM with two data-parallel engines on a fake model; prints what its operator and a router see, as JSON.

    VLLM_PLUGINS=kv_pool KV_POOL_VLLM_CONTROL=1 python data_parallel_engines.py FOLDER

vLLM's own front end, coordinator and engine processes run; only the executor is not vLLM's. The model's
configuration is written to FOLDER. Prompts are sent to chosen engines.
"""

import asyncio
import json
import random
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from integrations.fake_executor import FakeExecutor
from integrations.made_scheduler import MODEL
from integrations.start_method import keep_start_method

from kv_pool.control import ControlClient
from kv_pool.control.socket_path import list_nodes
from kv_pool.events import KVEventSubscriber, PrefixMirror, ReceivedBatch

NUM_ENGINES = 2
PROMPTS = {name: [number] * 130 for number, name in enumerate("ABC")}
# A prompt, and the rank of the engine that gets it.
SENT = [("A", 0), ("A", 0), ("B", 1), ("B", 1), ("A", 1), ("C", 0), ("C", 0)]
TIMEOUT_S = 60


def find_ports(count):
    """Return the first of `count` consecutive free ports."""
    while True:
        first = random.randrange(20_000, 60_000)
        try:
            with ExitStack() as opened:
                for port in range(first, first + count):
                    opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def follow_events(port, num_blocks):
    """Read the events of all engines until each has stored its blocks; return (mirror, ranks in batches)."""
    mirror, ranks = PrefixMirror(learns_tokens=True), {}
    deadline = time.monotonic() + TIMEOUT_S
    for rank in range(NUM_ENGINES):
        name = f"rank {rank}"
        live, replay = (f"tcp://127.0.0.1:{first + rank}" for first in (port, port + NUM_ENGINES))
        with KVEventSubscriber(live, replay) as subscriber:
            while name not in mirror.publisher_ids or mirror.count_blocks(name) < num_blocks[rank]:
                assert time.monotonic() < deadline, f"{name} has not stored {num_blocks[rank]} blocks"
                for item in subscriber.poll(1.0):
                    assert isinstance(item, ReceivedBatch), item
                    mirror.apply(name, item.batch.events)
                    ranks.setdefault(name, set()).add(item.batch.data_parallel_rank)
    return mirror, {name: sorted(found) for name, found in ranks.items()}


async def serve(folder, port):
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=FakeExecutor,
        data_parallel_size=NUM_ENGINES,
        max_model_len=512,
        dtype="float32",
        async_scheduling=False,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://127.0.0.1:{port}",
            replay_endpoint=f"tcp://127.0.0.1:{port + NUM_ENGINES}",
        ),
    )
    engine = AsyncLLM.from_engine_args(args)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)

    async def complete(number, name, rank):
        prompt = {"prompt_token_ids": PROMPTS[name]}
        steps = engine.generate(prompt, sampling, f"r{number}", data_parallel_rank=rank)
        return [output async for output in steps][-1].num_cached_tokens

    try:
        cached = [await complete(number, *sent) for number, sent in enumerate(SENT)]
        nodes = {}
        for node in list_nodes():
            with ControlClient(node=node) as client:
                found = client.get_statistics()
            nodes[node] = [found.total_blocks, found.cached_free_blocks, found.num_sequences]
        mirror, ranks = follow_events(port, [16, 16])
        held = {name: mirror.find_prefix_of_tokens(prompt) for name, prompt in PROMPTS.items()}
        return {"cached": cached, "nodes": nodes, "held": held, "ranks": ranks}
    finally:
        engine.shutdown()


def main():
    keep_start_method()
    folder = Path(sys.argv[1])
    (folder / "config.json").write_text(json.dumps(MODEL))
    print(json.dumps(asyncio.run(serve(folder, find_ports(2 * NUM_ENGINES)))))


if __name__ == "__main__":
    main()
