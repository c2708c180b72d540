"""Compare the CPU time of following an event stream with Dynamo's. See benchmarks/README.md."""

import json
import os
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from argparse import SUPPRESS
from collections import deque
from collections.abc import Callable
from typing import Any

from measuring import (
    Row,
    make_parser,
    print_header,
    read_cpu_s,
    read_options,
    run_child,
    start_run,
    write_results,
)

from kv_pool import BlockRemoved, BlockStored
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.events.batch import END_OF_REPLAY, KVEventBatch, encode_batch, pack_sequence, unpack_sequence
from kv_pool.events.mirror import PrefixMirror, apply_item
from kv_pool.events.sockets import zmq
from kv_pool.events.stream_items import ReceivedBatch
from kv_pool.events.subscriber import KVEventSubscriber
from kv_pool.ids import GroupId

BLOCK_SIZE = 16
EVENT_BLOCKS = 8
STORES_PER_BATCH = 4
BATCH_BLOCKS = EVENT_BLOCKS * STORES_PER_BATCH
DYNAMO, HASHES, TOKENS, NOTHING = "Dynamo's indexer", "PrefixMirror", "PrefixMirror with tokens", "no mirror"
SHARED_HASHES, SHARED_TOKENS = "the same, two publishers", "with tokens, two publishers"
HOST = "127.0.0.1"


class Feed:
    """A publisher of prepared payloads: sends all of them on request, and an empty live batch at times."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.payloads = payloads
        self.context: zmq.Context[Any] = zmq.Context()
        self.live = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDHWM, 0)
        for one in (self.live, self.router):
            one.bind(f"tcp://{HOST}:*")
        self.is_closing = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def endpoints(self) -> list[str]:
        names = [one.getsockopt(zmq.LAST_ENDPOINT) for one in (self.live, self.router)]
        return [bytes(name).rstrip(b"\0").decode() for name in names]

    def run(self) -> None:
        sequence = len(self.payloads)
        while not self.is_closing:
            if not self.router.poll(100):
                payload = encode_batch(KVEventBatch(time.time(), [], 0))
                self.payloads.append(payload)
                self.live.send_multipart([b"", pack_sequence(sequence), payload])
                sequence += 1
                continue
            identity, _, start = self.router.recv_multipart()
            for number in range(unpack_sequence(start), sequence):
                self.router.send_multipart([identity, b"", b"", pack_sequence(number), self.payloads[number]])
            self.router.send_multipart([identity, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self.is_closing = True
        self.thread.join()
        self.live.close(linger=0)
        self.router.close(linger=0)
        self.context.term()


def make_stream(num_batches: int, num_held: int, seed: int) -> tuple[list[bytes], int, list[int]]:
    """Return payloads, the number of blocks stored and removed in them, and the tokens stored last.

    Each batch stores a chain of `BATCH_BLOCKS` blocks in events of `EVENT_BLOCKS`. Once `num_held` blocks are
    stored, it also removes the oldest chain in one event, like a `StreamState`.
    """
    rng = random.Random(seed)
    held: deque[list[Any]] = deque()
    payloads = []
    num_blocks = 0
    tokens: list[int] = []
    for number in range(num_batches):
        events: list[KVCacheEvent] = []
        if len(held) * BATCH_BLOCKS >= num_held:
            events.append(BlockRemoved(held.popleft()[::-1], "GPU", GroupId(0)))
            num_blocks += BATCH_BLOCKS
        chain: list[Any] = [rng.getrandbits(64) for _ in range(BATCH_BLOCKS)]
        tokens = [rng.randrange(150_000) for _ in range(BATCH_BLOCKS * BLOCK_SIZE)]
        for first in range(0, BATCH_BLOCKS, EVENT_BLOCKS):
            end = first + EVENT_BLOCKS
            span = tokens[first * BLOCK_SIZE : end * BLOCK_SIZE]
            parent = chain[first - 1] if first else None
            store = BlockStored(chain[first:end], parent, span, BLOCK_SIZE, None, "GPU", None)
            store.extra_keys = [None] * EVENT_BLOCKS
            store.group_idx, store.kv_cache_spec_kind = GroupId(0), "full_attention"
            events.append(store)
        held.append(chain)
        num_blocks += BATCH_BLOCKS
        payloads.append(encode_batch(KVEventBatch(1.7e9 + number, events, 0)))
    return payloads, num_blocks, tokens


def ask(port: int, path: str, **asked: Any) -> Any:
    body = json.dumps(asked).encode() if asked else None
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


def wait_until(is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError("a subscriber did not reach the end of the stream")
        time.sleep(0.05)


def measure_dynamo(python: str, feed: Feed, tokens: list[int]) -> float:
    """Return the CPU seconds until Dynamo's stand-alone indexer knows the last tokens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    indexer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def is_up() -> bool:
            try:
                ask(port, "/health")
            except OSError:
                return False
            return True

        def knows_last_tokens() -> bool:
            scores = ask(port, "/query", model_name="m", token_ids=tokens)["scores"]
            return bool(scores.get("1", {}).get("0", 0) == len(tokens))

        wait_until(is_up)
        live, replay = feed.endpoints()
        before = read_cpu_s(indexer.pid)
        ask(
            port,
            "/register",
            instance_id=1,
            endpoint=live,
            replay_endpoint=replay,
            model_name="m",
            block_size=BLOCK_SIZE,
        )
        wait_until(knows_last_tokens)
        return read_cpu_s(indexer.pid) - before
    finally:
        indexer.kill()
        indexer.wait()


def measure_ours(name: str, feed: Feed, num_batches: int) -> float:
    """Return the CPU seconds of a subscriber and a mirror, in a separate process."""
    return float(run_child(__file__, "--read", name, *feed.endpoints(), str(num_batches)))


def read(name: str, live: str, replay: str, num_batches: int) -> None:
    """Follow the stream to its end and print the CPU seconds."""
    mirror = PrefixMirror(learns_tokens=name in (TOKENS, SHARED_TOKENS))
    if name in (SHARED_HASHES, SHARED_TOKENS):
        mirror.apply(
            "other engine", [BlockStored([1], None, [0] * BLOCK_SIZE, BLOCK_SIZE, None, "GPU", None)]
        )
    before = read_cpu_s(os.getpid())
    with KVEventSubscriber(live, replay, max_queued=1_000_000) as subscriber:
        for item in subscriber:
            if name != NOTHING:
                apply_item(mirror, item, "engine")
            if isinstance(item, ReceivedBatch) and item.sequence >= num_batches - 1:
                break
    print(read_cpu_s(os.getpid()) - before)


def main() -> None:
    parser = make_parser(__doc__, runs=7)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--held", type=int, default=100_000, help="number of blocks stored at any time")
    parser.add_argument("--dynamo", metavar="PYTHON", help="interpreter with ai-dynamo-runtime")
    parser.add_argument("--read", nargs=4, help=SUPPRESS)
    options = read_options(parser, batches=200, held=1000, runs=1)
    if options.read is not None:
        name, live, replay, num_batches = options.read
        read(name, live, replay, int(num_batches))
        return
    names = [NOTHING, HASHES, SHARED_HASHES, TOKENS, SHARED_TOKENS] + ([DYNAMO] if options.dynamo else [])
    facts = {}
    if options.dynamo:
        script = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
        asked = subprocess.run([options.dynamo, "-c", script], check=True, capture_output=True, text=True)
        facts["ai-dynamo-runtime"] = asked.stdout.strip()
    provenance = start_run(options, compared=names, **facts)
    payloads, num_blocks, tokens = make_stream(options.batches, options.held, options.seed)
    num_bytes = sum(map(len, payloads))
    print(f"{options.batches:,} batches, {num_blocks:,} blocks stored or removed, {num_bytes / 1e6:.0f} MB")
    feed = Feed(payloads)
    row = Row("thousand blocks per CPU second", "1000/s", {name: [] for name in names}, DYNAMO)
    try:
        for _ in range(options.runs):
            for name in names:
                if name == DYNAMO:
                    seconds = measure_dynamo(options.dynamo, feed, tokens)
                else:
                    seconds = measure_ours(name, feed, options.batches)
                row.samples[name].append(num_blocks / max(seconds, 0.01) / 1e3)
    finally:
        feed.close()
    print_header("of Dynamo")
    row.print()
    found = {"num_blocks": num_blocks, "num_bytes": num_bytes, "rows": [row.to_json()]}
    write_results(options, {"provenance": provenance, **found})


if __name__ == "__main__":
    main()
