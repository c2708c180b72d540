"""The recipe of nano_vllm_*.json.gz: what nano-vllm's scheduler asks of its block manager, and the answers.

    python tests/integrations/data/record_nano_vllm.py CHECKOUT tests/integrations/data/nano_vllm_2026.json.gz

CHECKOUT is a nano-vllm source tree of either shape; its scheduler, sequence and block manager are run as they
are, without the rest of the package, which wants a GPU.
"""

import argparse
import gzip
import hashlib
import inspect
import json
import random
import sys
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

RECORDED_FILES = ("block_manager.py", "scheduler.py", "sequence.py")
STEPS_PER_RUN = 200
EOS = 0


def import_checkout(checkout):
    """The scheduler's and the sequence's module, without `nanovllm/__init__.py`, which loads torch."""
    for name in ("nanovllm", "nanovllm.engine"):
        package = ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    config = ModuleType("nanovllm.config")
    config.Config = SimpleNamespace
    sys.modules["nanovllm.config"] = config
    return import_module("nanovllm.engine.scheduler"), import_module("nanovllm.engine.sequence")


def git_blob_id(path):
    """Return the id that `git hash-object` prints: the same file has the same id in every clone."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Witness:
    """Stands before a block manager and writes down each call with what the sequence was and became."""

    def __init__(self, manager, calls):
        self.manager = manager
        self.calls = calls

    def __getattr__(self, name):
        asked = getattr(self.manager, name)

        def ask(seq, *arguments):
            scheduled = getattr(seq, "num_scheduled_tokens", 0)
            before = [seq.number, len(seq), seq.num_cached_tokens, scheduled, *map(int, arguments)]
            num_held = len(seq.block_table)
            answer = asked(seq, *arguments)
            after = [seq.num_cached_tokens, len(seq.block_table), seq.block_table[num_held:]]
            self.calls.append([name, before, answer, after])
            return answer

        return ask


class Workload:
    """Random sequences through one scheduler; the same seed draws the same whatever is under it.

    Some prompts start like earlier ones, some are whole earlier conversations with more at the end; there are
    few blocks, so that sequences wait and are preempted.
    """

    def __init__(self, seed, scheduler_module, sequence_module):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice((2, 4, 8))
        self.num_blocks = rng.randint(6, 40)
        self.sequence_class = sequence_module.Sequence
        self.sequence_class.block_size = self.block_size
        self.sequence_class.counter = count()
        self.chunks = "is_prefill" in inspect.signature(scheduler_module.Scheduler.postprocess).parameters
        num_slots = self.num_blocks * self.block_size
        max_num_batched_tokens = rng.randint(self.block_size, 2 * num_slots)
        # What never fits makes their scheduler fail; a scheduler without chunks takes whole prompts only.
        self.max_tokens = num_slots if self.chunks else min(num_slots, max_num_batched_tokens)
        self.scheduler = scheduler_module.Scheduler(
            SimpleNamespace(
                max_num_seqs=rng.randint(1, 8),
                max_num_batched_tokens=max_num_batched_tokens,
                eos=EOS,
                num_kvcache_blocks=self.num_blocks,
                kvcache_block_size=self.block_size,
            )
        )
        self.calls = []
        self.scheduler.block_manager = Witness(self.scheduler.block_manager, self.calls)
        self.rate = rng.choice((0.1, 0.3, 0.6))
        self.sequences = []

    def draw_tokens(self, count):
        return [self.rng.randint(1, 999) for _ in range(count)]

    def add(self):
        limit = self.rng.randint(2, self.max_tokens)
        prompt = []
        if self.sequences and self.rng.random() < 0.7:
            earlier = self.rng.choice(self.sequences[-8:]).token_ids
            prompt = earlier[: self.rng.choice((len(earlier), self.rng.randint(1, len(earlier))))]
        if not prompt or self.rng.random() < 0.7:
            prompt = prompt + self.draw_tokens(self.rng.randint(1, 3 * self.block_size))
        prompt = prompt[: limit - 1]
        params = SimpleNamespace(
            temperature=1.0, max_tokens=self.rng.randint(1, limit - len(prompt)), ignore_eos=False
        )
        seq = self.sequence_class(prompt, params)
        seq.number = len(self.sequences)
        self.sequences.append(seq)
        self.scheduler.add(seq)

    def step(self):
        """One step of an engine."""
        if self.scheduler.is_finished() or self.rng.random() < self.rate:
            self.add()
        seqs, is_prefill = self.scheduler.schedule()
        tokens = [EOS if self.rng.random() < 0.02 else token for token in self.draw_tokens(len(seqs))]
        self.scheduler.postprocess(seqs, tokens, *([is_prefill] if self.chunks else []))


def run(seed, scheduler_module, sequence_module):
    workload = Workload(seed, scheduler_module, sequence_module)
    for _ in range(STEPS_PER_RUN):
        workload.step()
    return workload


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="where to write the record")
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--source", default="", help="where the checkout is from; goes into the record")
    options = parser.parse_args()
    modules = import_checkout(options.checkout)
    seeds = range(options.seed, options.seed + -(-options.steps // STEPS_PER_RUN))
    theirs = [run(seed, *modules) for seed in seeds]
    print(f"{len(theirs)} runs, {sum(len(workload.calls) for workload in theirs)} calls")
    if options.out:
        engine = options.checkout / "nanovllm" / "engine"
        record = {
            "source": options.source,
            "git_blobs": {name: git_blob_id(engine / name) for name in RECORDED_FILES},
            "runs": [
                {
                    "num_blocks": workload.num_blocks,
                    "block_size": workload.block_size,
                    "sequences": [seq.token_ids for seq in workload.sequences],
                    "calls": workload.calls,
                }
                for workload in theirs
            ],
        }
        written = json.dumps(record, separators=(",", ":")).encode()
        options.out.write_bytes(gzip.compress(written, mtime=0))


if __name__ == "__main__":
    main()
