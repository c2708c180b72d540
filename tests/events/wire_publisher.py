"""The stream of vLLM 0.33 from raw sockets, without code of kv_pool, with faults on demand.

The answer to a replay is the buffered batches from the start on, without notice of missing ones, and the end.
"""

import struct
import threading
from collections import deque

import msgspec
import zmq


class WirePublisher:
    """A publisher with PUB and ROUTER in one thread, as in vLLM."""

    def __init__(
        self, buffer_steps=10_000, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    ):
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.PUB)
        self.live.bind(endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDHWM, 2 * (buffer_steps + 1))
        self.router.bind(replay_endpoint)
        self.endpoint = self.live.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.replay_endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.buffer = deque(maxlen=buffer_steps)
        self.sequence = 0
        self.ts = 1_700_000_000.0
        self.requests = []
        self.ignores_requests = False
        self.lock = threading.Lock()
        self.is_closing = False
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def publish(self, events, is_dropped=False, payload=None, topic=b""):
        """Publish one batch; a dropped one is only buffered for replay."""
        with self.lock:
            self.ts += 0.001
            if payload is None:
                payload = msgspec.msgpack.encode([self.ts, events, 0])
            self.buffer.append((self.sequence, payload))
            if not is_dropped:
                self.live.send_multipart([topic, struct.pack(">Q", self.sequence), payload])
            self.sequence += 1

    def answer(self):
        while not self.is_closing:
            if not self.router.poll(20):
                continue
            identity, empty, start = self.router.recv_multipart()
            assert empty == b""
            (wanted,) = struct.unpack(">Q", start)
            with self.lock:
                self.requests.append(wanted)
                if self.ignores_requests:
                    continue
                for sequence, payload in self.buffer:
                    if sequence >= wanted:
                        number = struct.pack(">Q", sequence)
                        self.router.send_multipart([identity, b"", b"", number, payload])
                self.router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    def close(self):
        self.is_closing = True
        self.thread.join()
        self.live.close(linger=0)
        self.router.close(linger=0)
        self.context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
