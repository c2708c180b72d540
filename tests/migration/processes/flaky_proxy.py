"""`FlakyProxy`: a TCP proxy that delays, corrupts, drops and cuts at given rates."""

import contextlib
import random
import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """The probabilities, 0 to 1, of faults per chunk of bytes. Large chunks are mostly bytes of blocks."""

    corrupt: float = 0.0
    corrupt_blocks: float = 0.0
    swallow: float = 0.0
    cut: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02


NO_FAULTS = Faults()


class FlakyProxy:
    """A proxy that listens at `address` and forwards bytes to and from `upstream`."""

    def __init__(self, seed):
        self.faults = NO_FAULTS
        self.upstream = None
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sockets = set()
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def seed(self, seed, faults):
        with self._lock:
            self._random.seed(seed)
            self.faults = faults

    def cut_all(self):
        """End every connection, as a broken cable would."""
        with self._lock:
            for one in self._sockets:
                shut_down(one)

    def close(self):
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut_all()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            upstream = self.upstream
            try:
                host, _, port = upstream.rpartition(":")
                far = socket.create_connection((host, int(port)), timeout=1.0)
            except (OSError, AttributeError):
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            both = threading.Barrier(2)
            for source, target in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(source, target, both), daemon=True).start()

    def _pass_on(self, source, target, both):
        try:
            while data := source.recv(65536):
                kept = self._meddle(bytearray(data))
                if kept is None:
                    break
                target.sendall(kept)
        except OSError:
            pass
        for one in (source, target):
            shut_down(one)
        both.wait()
        source.close()
        with self._lock:
            self._sockets.discard(source)

    def _meddle(self, data):
        """Return the bytes to forward; None to cut the connection."""
        with self._lock:
            faults, draw = self.faults, self._random.random
            if faults is NO_FAULTS:
                return data
            if draw() < faults.cut:
                return None
            if draw() < faults.swallow:
                return b""
            if draw() < (faults.corrupt_blocks if len(data) > 4096 else faults.corrupt):
                data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            is_late = draw() < faults.delay
        if is_late:
            # The delay is the fault; no test waits for its end.
            self._stopped.wait(faults.delay_s)
        return data


def shut_down(one):
    with contextlib.suppress(OSError):  # already closed
        one.shutdown(socket.SHUT_RDWR)
