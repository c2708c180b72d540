"""Builds small traces for curves, and the pieces of their prompts."""

import random

from lab.made_trace import record

from kv_pool.lab.curves.reuse import ReuseRecorder, find_key_bytes, read_prompt_keys


def read_prompts(settings):
    """Return the prompts of a trace, the block size and the width of a key."""
    trace = settings.open_trace()
    return list(read_prompt_keys(trace)), trace.pool_block_size, find_key_bytes(trace)


def record_reuse(prompts, block_size, key_bytes):
    """Return the pieces of these prompts."""
    recorder = ReuseRecorder(block_size, key_bytes)
    for prompt in prompts:
        recorder.add(prompt)
    return recorder.finish()


def read_reuse(settings):
    """Return the pieces of the prompts of a trace."""
    return record_reuse(*read_prompts(settings))


def make_repeating_records(seed, num_requests, block_size, longest=12, num_kept=6):
    """Return requests that often repeat or shorten one of the last prompts, mostly in full blocks."""
    rng = random.Random(seed)
    prompts = [[]]
    records = []
    num_ids = 0
    for _ in range(num_requests):
        chance = rng.random()
        ids = list(rng.choice(prompts))
        if chance < 0.6:
            ids = ids[: rng.randrange(len(ids) + 1)]
        if chance > 0.35 or not ids:
            num_new = rng.randrange(1, 5)
            ids += range(num_ids, num_ids + num_new)
            num_ids += num_new
        ids = ids[:longest]
        prompts = [*prompts, ids][-num_kept:]
        rest = rng.choice([0, 0, 0, block_size // 2])
        records.append(record(len(ids) * block_size + rest, ids))
    return records
