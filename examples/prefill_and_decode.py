"""Prefill on one node, decode on another: blocks are transferred between processes over TCP or NIXL.

This process starts two others, each with the same small Llama, a pool and the bytes of its blocks. One
computes prompts; the other fetches their blocks, verified by checksum, and generates, in two ways:

- Copy a prefix. Common parts of prompts are transferred once. The decoder computes the rest.
- Move a request with its partly filled last block and its generated tokens. No token is computed again, and
  the source has released the request when the target has it.

Each output is compared with the output of transformers in one process, with its own cache.

Run it: pip install '.[transformers,zmq]' && python examples/prefill_and_decode.py
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

from kv_pool import BlockHasher, BlockPool, KVCacheManager, NodeName, Request, RequestId
from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage
from kv_pool.migration import (
    Migrator,
    NixlBackend,
    PrefixSubject,
    SequenceSubject,
    TcpBackend,
    load_secret,
    write_secret_file,
)
from kv_pool.migration.messages import Subject

BLOCK_SIZE, NUM_BLOCKS, NUM_NEW_TOKENS, VOCABULARY = 8, 121, 24, 128
BACKENDS = {"tcp": TcpBackend, "nixl": NixlBackend}

torch.set_num_threads(1)  # the tensors are tiny: more threads would be slower


def make_model(attention: str) -> Any:
    """Return a model with fixed random weights. In float64 rounding does not change the output."""
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
    """One process: a model, a pool, the bytes of its blocks, and a migrator that transfers them."""

    def __init__(self, name: NodeName, backend: str, secret_file: str) -> None:
        self.model = make_model("kv_pool")
        self.hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
        self.requests: dict[RequestId, Request] = {}
        self.manager = KVCacheManager(BlockPool(NUM_BLOCKS, True, BLOCK_SIZE))
        storage = allocate_storage(self.model, NUM_BLOCKS, BLOCK_SIZE)
        self.sequences = PagedSequences(self.manager, storage)
        site = self.sequences.make_site(self.hasher, self.requests)
        self.lock = site.lock  # transfers run in other threads
        self.migrator = Migrator(
            name,
            site,
            backends=[BACKENDS[backend](storage)],
            secret=load_secret(secret_file),
            listen="127.0.0.1:0",
        )
        self.migrator.start()

    # ---- commands --------------------------------------------------------------------------------

    def get_address(self) -> str:
        return self.migrator.address

    def meet(self, name: NodeName, address: str) -> None:
        self.migrator.peers.add(name, address)

    def compute(self, name: RequestId, prompt: list[int]) -> None:
        """Compute K and V of a prompt, and the first token after it."""
        with self.lock:
            self.admit(name, prompt)
            self.step([self.requests[name]])

    def admit(self, name: RequestId, prompt: list[int]) -> int:
        """Allocate blocks for a request, and return the number of its cached tokens."""
        with self.lock:
            self.requests[name] = Request(name, prompt, self.hasher)
            num_cached_tokens = self.sequences.admit(self.requests[name])
            assert num_cached_tokens is not None, "the pool is large enough for all requests"
            return num_cached_tokens

    def free(self, name: RequestId) -> None:
        """Release a request's blocks; they stay cached until they are reused."""
        with self.lock:
            self.sequences.free(self.requests.pop(name))

    def fetch_prefix(self, source: NodeName, prompt: list[int]) -> dict[str, int]:
        request = Request(RequestId(""), prompt, self.hasher)
        return self.fetch(PrefixSubject(tuple(request.block_hashes)), source, is_move=False)

    def fetch_request(self, source: NodeName, name: RequestId) -> dict[str, int]:
        return self.fetch(SequenceSubject(name), source, is_move=True)

    def fetch(self, subject: Subject, source: NodeName, is_move: bool) -> dict[str, int]:
        migration = self.migrator.fetch(subject, source, is_move=is_move)
        migration.wait(timeout_s=30)
        status = migration.get_status()
        return {
            "migrations": 1,
            "blocks": status.num_blocks,
            "already present": status.num_present_blocks,
            "bytes read": status.num_bytes,
            "pieces read": status.num_descriptors,
        }

    def generate(self) -> dict[RequestId, list[int]]:
        """Run all requests of this node to their ends, and return their tokens."""
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
    """Execute the command in each line of the input, and reply with a line."""
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(node, what)(*arguments)), flush=True)
    node.migrator.stop()


class Process:
    """A node in its own process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([what, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a node has exited; see its error above")
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
        serve(Node(NodeName(options.node), options.backend, options.secret_file))
        return

    rng = random.Random(0)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    prompts = {
        f"r{number}": prefixes[number % 3] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        for number in range(12)
    }
    with tempfile.TemporaryDirectory() as folder:
        secret_file = str(Path(folder, "secret"))
        write_secret_file(secret_file)  # readable only by this user; both nodes read it
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
                copied["prompt tokens recomputed"] += len(prompt) - num_cached_tokens
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
    print(f"{num_left:>8} blocks are still in use on the prefill node")
    print(f"{num_equal:>8} outputs equal those of one process, token by token")


if __name__ == "__main__":
    main()

# prints:
# 12 prompts with 3 prefixes, in blocks of 8 tokens, over tcp
# prefixes copied
#        6 migrations
#       33 blocks
#       20 already present
#   79,872 bytes read
#        3 pieces read
#       25 prompt tokens recomputed
# requests moved
#        6 migrations
#       38 blocks
#       25 already present
#   79,872 bytes read
#        6 pieces read
#        0 blocks are still in use on the prefill node
#       12 outputs equal those of one process, token by token
