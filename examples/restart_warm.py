"""Restart an engine, and hit the blocks that its previous process had cached.

The first process computes prompts and dumps its pool with the bytes. The second process loads the file, finds
the same prompts cached, and checks the bytes of each block. The engine is a stand-in: K and V of a token are
numbers derived from it and all tokens before it.

Run it: python examples/restart_warm.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, RequestId
from kv_pool.events import StreamState
from kv_pool.manager import list_slots
from kv_pool.storage import BlockLayout, KVStorage
from kv_pool.tiers import dump_pool, load_pool

BLOCK_SIZE, NUM_BLOCKS = 16, 200
SYSTEM_PROMPT = list(range(320))


class Engine:
    """A manager and the bytes of its blocks."""

    def __init__(self) -> None:
        # The hashes must be the same in both processes: sha256, or xxh3_128 with a seed.
        self.hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
        self.pool = BlockPool(NUM_BLOCKS, True, BLOCK_SIZE, enable_kv_cache_events=True)
        self.manager = KVCacheManager(self.pool)
        self.storage = KVStorage.allocate(NUM_BLOCKS, BLOCK_SIZE, 2, 2, 8, "float32")
        self.layout = BlockLayout.describe(self.storage, BLOCK_SIZE, self.hasher)
        self.stream_state = StreamState()  # a publisher has one, to which it applies the events

    def run(self, name: RequestId, token_ids: list[int]) -> tuple[int, bool]:
        """Run a prompt; return its number of cached tokens, and whether all K and V are right."""
        request = Request(name, token_ids, self.hasher)
        prefix = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - prefix.num_tokens
        assert self.manager.allocate_slots(request, num_new, prefix) is not None
        slots = list_slots(self.manager.get_block_ids(name), 0, request.num_tokens, BLOCK_SIZE)
        states = compute(token_ids)
        for layer in range(2):
            new = states[prefix.num_tokens :]
            self.storage.write(layer, slots[prefix.num_tokens :], new, -new)
        is_right = all(np.array_equal(self.storage.read(layer, slots)[0], states) for layer in range(2))
        self.manager.free(request)
        self.stream_state.apply(self.manager.take_events())
        return prefix.num_tokens, is_right


def compute(token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Return states of shape (num_tokens, heads, elements); each row depends on all tokens so far."""
    sums = np.cumsum(np.array(token_ids, np.float32) + 1)
    return np.broadcast_to(sums[:, None, None], (len(token_ids), 2, 8)).astype(np.float32)


def run_prompts(engine: Engine) -> None:
    for number in range(4):
        num_cached, is_right = engine.run(RequestId(f"r{number}"), SYSTEM_PROMPT + [1000 + number] * 40)
        verdict = "right" if is_right else "WRONG"
        print(f"  prompt {number}: {num_cached} of 360 tokens cached, K and V are {verdict}")


def main() -> None:
    engine = Engine()
    if len(sys.argv) > 1:
        loaded = load_pool(sys.argv[1], engine.pool, storage=engine.storage, layout=engine.layout)
        events = engine.manager.take_events()
        engine.stream_state.apply(events, loaded.next_sequence)
        print(f"second process: {loaded.num_blocks} blocks loaded, {len(events)} events")
        print(f"  its publisher continues with PublisherConfig(first_sequence={loaded.next_sequence})")
        run_prompts(engine)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.dump"
        print("first process:")
        run_prompts(engine)
        header = dump_pool(
            path, engine.pool, storage=engine.storage, layout=engine.layout, stream_state=engine.stream_state
        )
        print(f"  {header.num_cached} cached blocks of {header.block_bytes:,} bytes dumped", flush=True)
        subprocess.run([sys.executable, __file__, str(path)], check=True)


if __name__ == "__main__":
    main()

# prints:
# first process:
#   prompt 0: 0 of 360 tokens cached, K and V are right
#   prompt 1: 320 of 360 tokens cached, K and V are right
#   prompt 2: 320 of 360 tokens cached, K and V are right
#   prompt 3: 320 of 360 tokens cached, K and V are right
#   28 cached blocks of 4,096 bytes dumped
# second process: 28 blocks loaded, 5 events
#   its publisher continues with PublisherConfig(first_sequence=4)
#   prompt 0: 352 of 360 tokens cached, K and V are right
#   prompt 1: 352 of 360 tokens cached, K and V are right
#   prompt 2: 352 of 360 tokens cached, K and V are right
#   prompt 3: 352 of 360 tokens cached, K and V are right
