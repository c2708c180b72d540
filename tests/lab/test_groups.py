"""Tests of KV cache groups in replays: parsing, hits against a slow model, and cost."""

import random

import pytest
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.lab.groups import parse_groups
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)


def test_groups_are_parsed_by_kind():
    assert parse_groups("full, window:100,chunked:64,mamba", 8) == [
        FullAttentionSpec(block_size=8),
        SlidingWindowSpec(block_size=8, sliding_window=100),
        ChunkedLocalAttentionSpec(block_size=8, attention_chunk_size=64),
        MambaSpec(block_size=8),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "full,",
        "sliding:8",
        "window",
        "window:",
        "window:0",
        "window:-8",
        "window:1_000",
        "full:8",
        "mamba:2",
    ],
)
def test_invalid_groups_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not a group; write full, window:TOKENS"):
        parse_groups(text, 8)


# ---- a slow model ------------------------------------------------------------------------------


class SlowGroups:
    """A slow model with one request at a time: lists of cached blocks, and of free blocks in order.

    A length is a hit if each group has every block that the next token attends to. The longest length counts.
    """

    def __init__(self, groups, capacity, block_size, chunk_tokens):
        self.groups = [(kind, int(tokens or 0)) for kind, _, tokens in (one.partition(":") for one in groups)]
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self.queue = list(range(capacity))
        self.content_of = {}  # block -> (group, hash id)
        self.holders = []  # the same as pairs, oldest first
        self.counts = dict.fromkeys(["blocks_hit", "tokens_hit", "evictions", "peak_blocks_in_use"], 0)

    def count_unneeded(self, group, num_tokens):
        """Return the number of blocks at the head to which no token after `num_tokens` attends."""
        kind, size = self.groups[group]
        first_needed = {
            "full": 0,
            "window": max(0, num_tokens - size + 1),
            "chunked": num_tokens - num_tokens % size if size else 0,
            "mamba": max(0, num_tokens - 1),
        }[kind]
        return first_needed // self.block_size

    def find(self, group, hash_id):
        return next((block for content, block in self.holders if content == (group, hash_id)), None)

    def find_hit(self, ids, max_tokens):
        for length in range(min(max_tokens // self.block_size, len(ids)), -1, -1):
            found = []
            for group in range(len(self.groups)):
                needed = range(self.count_unneeded(group, length * self.block_size), length)
                row = {position: self.find(group, ids[position]) for position in needed}
                if None in row.values():
                    break
                found.append(row)
            else:
                return length, found
        raise AssertionError("an empty prefix is always a hit")

    def take_all(self, num_blocks):
        taken = [self.queue.pop(0) for _ in range(num_blocks)]
        for block in taken:
            if block in self.content_of:
                self.counts["evictions"] += 1
                self.holders.remove((self.content_of.pop(block), block))
        return taken

    def free(self, blocks):
        self.queue = [block for block in blocks if block not in self.content_of] + self.queue
        self.queue += [block for block in blocks if block in self.content_of]

    def extend(self, tables, num_places, end):
        """Allocate blocks for all groups up to `end` tokens."""
        num_after = -(-end // self.block_size)
        for group, table in enumerate(tables):
            new = range(num_places[group], num_after)
            if self.groups[group][0] == "mamba":
                new = new[-1:]
            table.update(zip(new, self.take_all(len(new)), strict=True))
            num_places[group] = max(num_places[group], num_after)

    def note_use(self, tables):
        in_use = sum(len(table) for table in tables)
        self.counts["peak_blocks_in_use"] = max(self.counts["peak_blocks_in_use"], in_use)

    def finish(self, tables, num_hits):
        self.counts["blocks_hit"] += num_hits
        self.counts["tokens_hit"] += num_hits * self.block_size
        for table in tables:
            self.free([table[position] for position in sorted(table, reverse=True)])

    def run(self, traced):
        length, ids = traced["input_length"], traced["hash_ids"]
        ids = ids[: length // self.block_size]
        num_hits, tables = self.find_hit(ids, length - 1)
        for table in tables:
            for block in table.values():
                self.queue.remove(block)
        num_computed = num_hits * self.block_size
        num_cached = [num_hits] * len(self.groups)
        num_places = [num_hits] * len(self.groups)
        while num_computed < length:
            end = self.find_end_of_step(num_computed, length)
            for group, table in enumerate(tables):
                unneeded = self.count_unneeded(group, num_computed)
                self.free(
                    [table.pop(position) for position in sorted(table, reverse=True) if position < unneeded]
                )
            self.extend(tables, num_places, end)
            self.cache(tables, ids, num_cached, end)
            num_computed = end
            self.note_use(tables)
        self.finish(tables, num_hits)

    def find_end_of_step(self, start, length):
        end = length if self.chunk_tokens is None else min(length, start + self.chunk_tokens)
        if (
            any(kind == "mamba" for kind, _ in self.groups)
            and end // self.block_size * self.block_size > start
        ):
            end -= end % self.block_size
        return end

    def cache(self, tables, ids, num_cached, end):
        for group, table in enumerate(tables):
            for position in range(num_cached[group], end // self.block_size):
                is_state_between = (
                    self.groups[group][0] == "mamba" and (position + 1) * self.block_size != end
                )
                if position in table and not is_state_between:
                    self.content_of[table[position]] = (group, ids[position])
                    self.holders.append(((group, ids[position]), table[position]))
            num_cached[group] = end // self.block_size


MODELS = [
    "full",
    "window:9",
    "chunked:16",
    "mamba",
    "full,window:9",
    "full,mamba",
    "window:20,chunked:32",
    "full,window:2,window:33,chunked:8,mamba",
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk_tokens", [None, 8, 20])
@pytest.mark.parametrize("groups", MODELS)
def test_hits_of_several_groups_match_a_slow_model(tmp_path, groups, chunk_tokens, seed):
    rng = random.Random(seed)
    # From the first request the reader infers 8 tokens per id.
    records = [record(1, [10**6]), *make_random_records(rng, 150, 8, partial_ids=True)]
    kinds = groups.split(",")
    most = max(-(-traced["input_length"] // 8) for traced in records)
    capacity = len(kinds) * most + rng.randrange(10)
    model = SlowGroups(kinds, capacity, 8, chunk_tokens)
    for traced in records:
        model.run(traced)
    report = run_replay(
        ReplaySettings(
            str(write_trace(tmp_path / "trace.jsonl", records)),
            capacity,
            trace_block_size=8,
            groups=groups,
            chunk_tokens=chunk_tokens,
        )
    )
    assert report.refused_requests == 0
    assert {name: getattr(report, name) for name in model.counts} == model.counts
    assert model.counts["blocks_hit"] > 0
    assert model.counts["evictions"] > 0
    assert report.settings["groups"] == groups


# ---- cost of groups ----------------------------------------------------------------------------


def test_steps_with_a_window_fit_prompts_larger_than_the_pool(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(800, list(range(100)))] * 2)
    settings = ReplaySettings(str(path), 10, trace_block_size=8, groups="window:17")
    with pytest.raises(InvalidArgumentError, match="the smallest request needs 100"):
        run_replay(settings)
    report = run_replay(
        ReplaySettings(str(path), 10, trace_block_size=8, groups="window:17", chunk_tokens=32)
    )
    assert report.refused_requests == 0
    assert report.peak_blocks_in_use <= 10
