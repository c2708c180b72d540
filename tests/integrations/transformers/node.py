"""A node with a tiny Llama, in this process or as a program that executes the lines of its input."""

import json
import os
import subprocess
import sys
from pathlib import Path

from integrations.transformers.made_model import (
    HASHER,
    check_kv,
    make_model,
    make_request,
    make_sequences,
    make_tiers,
    run_step,
)
from integrations.transformers.moved_blocks import crowd_out

from kv_pool.contiguous.invariants import check
from kv_pool.errors import KVPoolError
from kv_pool.migration.backends.nixl import NixlBackend
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.messages import PrefixSubject, SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.secret import load_secret

BACKENDS = {"tcp": TcpBackend, "nixl": NixlBackend}


class Node:
    """A node with a model, a pool and its storage, requests, and a migrator."""

    def __init__(self, name, secret_file, backend="tcp", num_blocks=60, tiers=None, **settings):
        self.requests = {}
        self.sequences = make_sequences(num_blocks, add_tiers=None if tiers is None else make_tiers(*tiers))
        self.site = self.sequences.make_site(HASHER, self.requests)
        self.lock = self.site.lock
        self.migrator = Migrator(
            name,
            self.site,
            backends=[BACKENDS[backend](self.sequences.storage)],
            secret=load_secret(secret_file),
            listen="127.0.0.1:0",
            **settings,
        )
        self.migrator.start()

    def get_address(self):
        return self.migrator.address

    def meet(self, name, address):
        self.migrator.peers.add(name, address)

    def admit(self, name, prompt):
        """Admit a request; return the number of cached tokens of its prompt."""
        with self.lock:
            request = make_request(name, prompt)
            num_cached_tokens = self.sequences.admit(request)
            if num_cached_tokens is not None:
                self.requests[name] = request
            return num_cached_tokens

    def generate(self, name, num_tokens):
        """Generate up to this many tokens, or until the pool is full; return the generated tokens."""
        with self.lock:
            request = self.requests[name]
            while len(generated := request.all_token_ids[request.num_prompt_tokens :]) < num_tokens:
                num_new_tokens = request.num_tokens - request.num_computed_tokens
                if not self.sequences.reserve(request, num_new_tokens):
                    break
                run_step(make_model(), self.sequences, [request], [num_new_tokens])
            return generated

    def free(self, name):
        with self.lock:
            self.sequences.free(self.requests.pop(name))

    def forget_all(self):
        """Remove all requests and cached blocks."""
        for name in self.list_requests():
            self.free(name)
        with self.lock:
            assert self.sequences.manager.reset_prefix_cache()

    def crowd_out(self):
        crowd_out(self.sequences)

    def list_requests(self):
        return list(self.requests)

    def fetch_prefix(self, source, prompt):
        subject = PrefixSubject(tuple(make_request("", prompt).block_hashes))
        return self.wait_for(self.migrator.fetch(subject, source))

    def fetch_request(self, source, name):
        return self.wait_for(self.migrator.fetch(SequenceSubject(name), source, is_move=True))

    def wait_for(self, migration):
        """Return the number of blocks, and of those already in the target; or the name of the error."""
        try:
            migration.wait(60.0)
        except KVPoolError as error:
            return type(error).__name__
        status = migration.get_status()
        return [status.num_blocks, status.num_present_blocks]

    def check(self):
        """Check K and V, and that no block is lost; return the number of blocks in use."""
        with self.lock:
            for request in self.requests.values():
                check_kv(self.sequences, request)
            self.migrator.check_invariants()
            pool = self.sequences.manager.block_pool
            check(pool)
            return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def stop(self):
        self.migrator.stop()


class NodeProcess:
    """A `Node` in a separate process, with the same methods."""

    def __init__(self, *arguments, **settings):
        tests = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integrations.transformers.node", json.dumps([arguments, settings])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tests)},
        )

    def __getattr__(self, what):
        def ask(*arguments):
            print(json.dumps([what, arguments]), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

        return ask

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def stop(self):
        """Stop the process by closing its input, unless it was killed before."""
        if self._process.returncode is None:
            self._process.communicate()
            assert self._process.returncode == 0


def main():
    arguments, settings = json.loads(sys.argv[1])
    node = Node(*arguments, **settings)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(node, what)(*arguments)), flush=True)
    node.stop()


if __name__ == "__main__":
    main()
