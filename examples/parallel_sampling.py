"""Forks: parallel samples of one prompt, and beam search, in blocks that sequences share while they agree.

The engine is a stand-in: it writes each token into its slot, and computes the next token only from what it
reads from the blocks. At the end each sequence is compared with one computed alone and without blocks.

Run it: python examples/parallel_sampling.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, RequestId
from kv_pool.manager import list_slots
from kv_pool.storage import KVStorage

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY, NUM_NEW_TOKENS = 4, 64, 50, 20
PROMPT = list(range(10, 31))  # 21 tokens: five full blocks, and one token in a sixth


def compute_scores(token_ids: Any) -> npt.NDArray[np.float64]:
    """Return the model's score of each next token, which depends on all previous tokens in order."""
    seed = [int(token_id) for token_id in np.ravel(token_ids)]
    return np.random.default_rng(seed).random(VOCABULARY)


class Engine:
    """An engine with block tables from the manager and bytes in a storage."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(BlockPool(NUM_BLOCKS + 1, True, BLOCK_SIZE))
        self.storage = KVStorage.allocate(NUM_BLOCKS + 1, BLOCK_SIZE, 1, 1, 1, dtype="float64")
        self.hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
        self.num_forks = self.num_copies = self.num_blocks_at_most = 0

    def start(self, name: str) -> Request:
        return Request(RequestId(name), PROMPT, self.hasher)

    def step(self, requests: list[Request]) -> list[npt.NDArray[np.float64]]:
        """Compute all pending tokens, and return the scores of the next tokens of each request."""
        for request in requests:
            num_tokens = request.num_tokens - request.num_computed_tokens
            if self.manager.allocate_slots(request, num_tokens) is None:
                raise MemoryError("a scheduler would preempt a request here")
        copies = self.manager.take_block_copies()  # before any slot is written
        self.storage.apply_moves(copies)
        self.num_copies += len(copies)
        for request in requests:
            slots = self.find_slots(request)[request.num_computed_tokens :]
            tokens = np.array(request.all_token_ids[request.num_computed_tokens :], float)[:, None, None]
            self.storage.write(0, slots, tokens, tokens)
        scores = [compute_scores(self.storage.read(0, self.find_slots(request))[0]) for request in requests]
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        in_use = NUM_BLOCKS - self.manager.get_num_free_blocks()
        self.num_blocks_at_most = max(self.num_blocks_at_most, in_use)
        return scores

    def fork(self, parent: Request) -> Request:
        """Return a sequence with the same tokens in the same blocks. The next write copies the last block."""
        self.num_forks += 1
        child = Request(RequestId(f"{parent.request_id}/{self.num_forks}"), parent.all_token_ids, self.hasher)
        child.num_computed_tokens = parent.num_computed_tokens
        self.manager.fork(parent, child)
        return child

    def free(self, requests: list[Request]) -> None:
        for request in requests:
            self.manager.free(request)

    def find_slots(self, request: Request) -> npt.NDArray[np.int64]:
        block_ids = self.manager.get_block_ids(request.request_id)
        return list_slots(block_ids, 0, request.num_tokens, BLOCK_SIZE)

    def report(self, what: str, num_equal: int, num_sequences: int) -> None:
        assert self.manager.get_num_free_blocks() == NUM_BLOCKS  # all blocks are free again
        num_tokens = len(PROMPT) + NUM_NEW_TOKENS
        print(f"{what}: {num_equal} of {num_sequences} sequences equal those computed without blocks")
        print(f"  {self.num_forks} forks, {self.num_copies} blocks copied")
        alone = num_sequences * -(-num_tokens // BLOCK_SIZE)
        print(f"  {self.num_blocks_at_most} blocks at most; {alone} without sharing")


def sample(engine: Engine, num_samples: int) -> list[list[int]]:
    """Compute the prompt once, and let each sample draw its own tokens."""
    first = engine.start("sample")
    (scores,) = engine.step([first])
    samples = [first, *(engine.fork(first) for _ in range(num_samples - 1))]
    all_scores = [scores] * num_samples
    for _ in range(NUM_NEW_TOKENS - 1):
        for number, (request, scores) in enumerate(zip(samples, all_scores, strict=True)):
            request.append_output_token_ids([draw(scores, number)])
        all_scores = engine.step(samples)
    engine.free(samples)
    return [
        [*request.all_token_ids, draw(scores, number)]
        for number, (request, scores) in enumerate(zip(samples, all_scores, strict=True))
    ]


def draw(scores: npt.NDArray[np.float64], number: int) -> int:
    """Return the next token of sample `number`: the one at that place in the order of scores."""
    return int(np.argsort(scores)[-1 - number])


def search(engine: Engine, width: int) -> list[list[int]]:
    """Return the beams of a search that keeps the best `width` continuations in each step."""
    beams = [(0.0, engine.start("beam"))]
    for _ in range(NUM_NEW_TOKENS):
        all_scores = engine.step([request for _, request in beams])
        best = choose([total for total, _ in beams], all_scores, width)
        # Fork before appending tokens: parents still end where their children begin.
        parents = [request for _, request in beams]
        going_on: set[int] = set()
        beams = []
        for total, index, _ in best:
            request = parents[index] if index not in going_on else engine.fork(parents[index])
            going_on.add(index)
            beams.append((total, request))
        engine.free([request for index, request in enumerate(parents) if index not in going_on])
        for (_, request), (_, _, token_id) in zip(beams, best, strict=True):
            request.append_output_token_ids([token_id])
    engine.free([request for _, request in beams])
    return [request.all_token_ids for _, request in beams]


def choose(
    totals: list[float], all_scores: list[npt.NDArray[np.float64]], width: int
) -> list[tuple[float, int, int]]:
    """Return the best continuations as (new total, index of the sequence, token id)."""
    candidates = [
        (total + float(score), index, token_id)
        for index, (total, scores) in enumerate(zip(totals, all_scores, strict=True))
        for token_id, score in enumerate(scores)
    ]
    return sorted(candidates, reverse=True)[:width]


def sample_without_blocks(num_samples: int) -> list[list[int]]:
    samples = [list(PROMPT) for _ in range(num_samples)]
    for number, token_ids in enumerate(samples):
        for _ in range(NUM_NEW_TOKENS):
            token_ids.append(draw(compute_scores(token_ids), number))
    return samples


def search_without_blocks(width: int) -> list[list[int]]:
    beams = [(0.0, list(PROMPT))]
    for _ in range(NUM_NEW_TOKENS):
        all_scores = [compute_scores(token_ids) for _, token_ids in beams]
        best = choose([total for total, _ in beams], all_scores, width)
        beams = [(total, [*beams[index][1], token_id]) for total, index, token_id in best]
    return [token_ids for _, token_ids in beams]


def main() -> None:
    engine = Engine()
    samples = sample(engine, 4)
    pairs = zip(samples, sample_without_blocks(4), strict=True)
    engine.report("parallel sampling", sum(ours == alone for ours, alone in pairs), 4)

    engine = Engine()
    beams = search(engine, 4)
    pairs = zip(beams, search_without_blocks(4), strict=True)
    engine.report("beam search", sum(ours == alone for ours, alone in pairs), 4)


if __name__ == "__main__":
    main()

# prints:
# parallel sampling: 4 of 4 sequences equal those computed without blocks
#   3 forks, 3 blocks copied
#   25 blocks at most; 44 without sharing
# beam search: 4 of 4 sequences equal those computed without blocks
#   28 forks, 21 blocks copied
#   14 blocks at most; 44 without sharing
