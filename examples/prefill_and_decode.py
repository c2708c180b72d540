"""Prefill on one node, decode on another: blocks cross from process to process, over TCP or NIXL.

This process starts two others, each with the same small Llama, a pool and the bytes of its blocks. One
computes prompts; the other fetches their blocks, verified by checksum, and goes on generating, in two ways:

- copy a prefix: what prompts have in common crosses once. The decoder computes what is in no full block;
- move a request, with its last block, partly filled, and what it has generated. Nothing is computed again,
  and the other node has given the request up when this one has it.

Each output is compared with what transformers generates in one process, with its own cache.

Run it: pip install '.[transformers]' && python examples/prefill_and_decode.py
        --backend nixl needs the extra nixl, too
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"this example needs torch and transformers ({error}): pip install '.[transformers]'")

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage
from kv_pool.migration.backends.nixl import NixlBackend
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.secret import load_secret, write_secret_file
from kv_pool.migration.subjects import PrefixSubject, SequenceSubject, Subject

BLOCK_SIZE, NUM_BLOCKS, NUM_NEW_TOKENS, VOCABULARY = 8, 121, 24, 128
BACKENDS = {"tcp": TcpBackend, "nixl": NixlBackend}

torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other


def make_model(attention: str) -> Any:
    """Always the same random weights. In float64 all ways to add up agree on the most likely token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(torch.float64).eval()


class Node:
    """One process: a model, a pool with its bytes, and a migrator through which others get at them."""

    def __init__(self, name: str, backend: str, secret_file: str) -> None:
        self.model = make_model("kv_pool")
        self.hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
        self.requests: dict[str, Request] = {}
        self.manager = KVCacheManager(BlockPool(NUM_BLOCKS, True, BLOCK_SIZE))
        storage = allocate_storage(self.model, NUM_BLOCKS, BLOCK_SIZE)
        self.sequences = PagedSequences(self.manager, storage)
        site = self.sequences.make_site(self.hasher, self.requests)
        self.lock = site.lock  # transfers go on in threads of their own
        self.migrator = Migrator(
            name,
            site,
            backends=[BACKENDS[backend](storage)],
            secret=load_secret(secret_file),
            listen="127.0.0.1:0",
        )
        self.migrator.start()

    # ---- what it is asked to do ------------------------------------------------------------------

    def get_address(self) -> str:
        return self.migrator.address

    def meet(self, name: str, address: str) -> None:
        self.migrator.peers.add(name, address)

    def compute(self, name: str, prompt: list[int]) -> None:
        """The prompt's K and V, and the first token after it."""
        with self.lock:
            self.admit(name, prompt)
            self.step([self.requests[name]])

    def admit(self, name: str, prompt: list[int]) -> int:
        """Blocks for a request; how many of its tokens need not be computed, since theirs are cached."""
        with self.lock:
            self.requests[name] = Request(name, prompt, self.hasher)
            num_cached_tokens = self.sequences.admit(self.requests[name])
            assert num_cached_tokens is not None, "the pool has room for all of them"
            return num_cached_tokens

    def free(self, name: str) -> None:
        """Its blocks are free then, and cached until they are taken for something else."""
        with self.lock:
            self.sequences.free(self.requests.pop(name))

    def fetch_prefix(self, source: str, prompt: list[int]) -> dict[str, int]:
        request = Request("", prompt, self.hasher)
        return self.fetch(PrefixSubject(tuple(request.block_hashes)), source, is_move=False)

    def fetch_request(self, source: str, name: str) -> dict[str, int]:
        return self.fetch(SequenceSubject(name), source, is_move=True)

    def fetch(self, subject: Subject, source: str, is_move: bool) -> dict[str, int]:
        migration = self.migrator.fetch(subject, source, is_move=is_move)
        migration.wait(timeout_s=30)
        status = migration.get_status()
        return {
            "migrations": 1,
            "blocks": status.num_blocks,
            "of them here already": status.num_present_blocks,
            "bytes read": status.num_bytes,
            "pieces that they were read in": status.num_descriptors,
        }

    def generate(self) -> dict[str, list[int]]:
        """All requests that are here to their ends, together."""
        outputs = {}
        with self.lock:
            while self.requests:
                self.step(list(self.requests.values()))
                for name, request in list(self.requests.items()):
                    if request.num_tokens == request.num_prompt_tokens + NUM_NEW_TOKENS:
                        outputs[name] = request.all_token_ids
                        self.free(name)
        return outputs

    def count_in_use(self) -> int:
        with self.lock:
            return NUM_BLOCKS - 1 - self.manager.get_num_free_blocks()

    def step(self, requests: list[Request]) -> None:
        counts = [request.num_tokens - request.num_computed_tokens for request in requests]
        cache = PagedCache(self.sequences, requests, counts, gathers=False)
        with torch.no_grad():
            logits = self.model(**cache.make_inputs()).logits
        for row, count, request in zip(logits, counts, requests, strict=True):
            request.append_output_token_ids([int(row[count - 1].argmax())])


def serve(node: Node) -> None:
    """Do what each line of the input says, and answer with a line."""
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(node, what)(*arguments)), flush=True)
    node.migrator.stop()


class Process:
    """A node in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([what, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a node has ended; why, it says above")
        return json.loads(line)

    def stop(self) -> None:
        self.process.communicate()  # closes its input


def generate_dense(model: Any, prompt: list[int]) -> list[int]:
    input_ids = torch.tensor([prompt])
    mask = torch.ones_like(input_ids)
    output = model.generate(input_ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    return list(output[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=BACKENDS, default="tcp")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--secret-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        serve(Node(options.node, options.backend, options.secret_file))
        return

    rng = random.Random(0)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    prompts = {
        f"r{number}": prefixes[number % 3] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        for number in range(12)
    }
    with tempfile.TemporaryDirectory() as folder:
        secret_file = str(Path(folder, "secret"))
        write_secret_file(secret_file)  # both nodes read it; nobody else can
        common = ["--backend", options.backend, "--secret-file", secret_file]
        prefill, decode = Process("--node", "prefill", *common), Process("--node", "decode", *common)
        decode.ask("meet", "prefill", prefill.ask("get_address"))

        copied, moved = Counter[str](), Counter[str]()
        for number, (name, prompt) in enumerate(prompts.items()):
            prefill.ask("compute", name, prompt)
            if number % 2:
                moved.update(decode.ask("fetch_request", "prefill", name))
            else:
                prefill.ask("free", name)
                copied.update(decode.ask("fetch_prefix", "prefill", prompt))
                num_cached_tokens = decode.ask("admit", name, prompt)
                copied["prompt tokens computed again"] += len(prompt) - num_cached_tokens
        outputs = decode.ask("generate")
        num_left = prefill.ask("count_in_use")
        for process in (prefill, decode):
            process.stop()

    model = make_model("sdpa")
    num_equal = sum(outputs[name] == generate_dense(model, prompt) for name, prompt in prompts.items())
    print(f"12 prompts with 3 prefixes, in blocks of {BLOCK_SIZE} tokens, over {options.backend}")
    for title, counts in (("prefixes copied", copied), ("requests moved", moved)):
        print(title)
        for what, count in counts.items():
            print(f"{count:>8,} {what}")
    print(f"{num_left:>8} blocks are in use where the prompts were computed")
    print(f"{num_equal:>8} outputs are, token for token, those of one process")


if __name__ == "__main__":
    main()

# prints:
# 12 prompts with 3 prefixes, in blocks of 8 tokens, over tcp
# prefixes copied
#        6 migrations
#       33 blocks
#       20 of them here already
#   79,872 bytes read
#        3 pieces that they were read in
#       25 prompt tokens computed again
# requests moved
#        6 migrations
#       38 blocks
#       25 of them here already
#   79,872 bytes read
#        6 pieces that they were read in
#        0 blocks are in use where the prompts were computed
#       12 outputs are, token for token, those of one process
