"""SMG's relay, from its wheel, in a gRPC server, and a gateway that handles batches as SMG's does."""

import asyncio
import threading
from concurrent.futures import Future

import grpc
from events.peers.busy_pool import BLOCK_SIZE
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_servicer.kv_relay import Engine, RankSource, relay


class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """A servicer with only an engine's call for cache events, answered by the relay."""

    def __init__(self, source, counts):
        self.source = source
        self.counts = counts

    async def SubscribeKvEvents(self, request, context):  # noqa: N802, the name in the protocol
        batches = relay(
            [self.source],
            Engine.VLLM,
            request.start_sequence_number,
            context,
            recv_timeout=0.1,
            hash_check="vllm-sha256-cbor",
            on_counts=self.counts.append,
        )
        async for batch in batches:
            yield batch


class SmgRelay:
    """A gRPC server on a thread with its own event loop."""

    def __init__(self, endpoint, replay_endpoint):
        self.source = RankSource(0, endpoint, replay_endpoint)
        self.counts = []
        self.address = Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)
        self.thread.start()
        self.address = self.address.result(20)

    async def run(self):
        self.loop = asyncio.get_running_loop()
        self.closing = asyncio.Event()
        server = grpc.aio.server()
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Servicer(self.source, self.counts), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.address.set_result(f"127.0.0.1:{port}")
        await self.closing.wait()
        await server.stop(grace=5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


class Gateway:
    """A relay's subscriber that counts copies; it clears and resubscribes when the relay reports lost data.

    Blocks are found by their tokens, as in SMG: the engine's hashes only link blocks to their parents.
    """

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        self.lock = threading.Lock()
        self.copies = {}
        self.blocks = {}
        self.last_sequence = None
        self.num_batches = 0
        self.failures = []
        self.is_closing = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.is_closing:
            self.call = self.stub.SubscribeKvEvents(
                common_pb2.SubscribeKvEventsRequest(start_sequence_number=0), wait_for_ready=True
            )
            try:
                for batch in self.call:
                    with self.lock:
                        self.apply(batch)
            except grpc.RpcError as error:
                if not self.is_closing:
                    with self.lock:
                        self.clear()
                        self.last_sequence = None
                        self.failures.append((error.code().name, error.details()))

    def apply(self, batch):
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                parent = (
                    event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                )
                for block in event.stored.blocks:
                    self.copies[block.block_hash] = self.copies.get(block.block_hash, 0) + 1
                    self.blocks[parent, tuple(block.token_ids)] = block.block_hash
                    parent = block.block_hash
            elif kind == "removed":
                for block_hash in event.removed.block_hashes:
                    self.copies[block_hash] = self.copies.get(block_hash, 0) - 1
                    if self.copies[block_hash] <= 0:
                        del self.copies[block_hash]
            else:
                self.clear()
        self.last_sequence = batch.sequence_number
        self.num_batches += 1

    def clear(self):
        self.copies.clear()
        self.blocks.clear()

    def count_overlaps(self, prompts):
        """Return the number of leading blocks of each prompt that the gateway knows for the engine."""
        with self.lock:
            return [self.count_overlap(prompt) for prompt in prompts]

    def count_overlap(self, prompt):
        parent = None
        for number in range(len(prompt) // BLOCK_SIZE):
            tokens = tuple(prompt[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            parent = self.blocks.get((parent, tokens))
            if parent not in self.copies:
                return number
        return len(prompt) // BLOCK_SIZE

    def list_hashes(self):
        """Return all hashes that the gateway knows for the engine, unsigned."""
        with self.lock:
            return {block_hash % 2**64 for block_hash in self.copies}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closing = True
        self.call.cancel()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.channel.close()
