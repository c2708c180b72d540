"""A source in a separate process: `python source_process.py KIND NUM_BLOCKS BLOCK_BYTES SEED`.

Prints its address and its backend's description, one line each in hex after `kv_pool`, then serves until the
end of its standard input.
"""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np


def make_bytes(num_blocks, block_bytes, seed):
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


class SourceProcess:
    """The parent's handle on the process."""

    def __init__(self, kind, num_blocks, block_bytes, seed=0):
        self.bytes = make_bytes(num_blocks, block_bytes, seed)
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, str(num_blocks), str(block_bytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.description = self._read_line().decode(), self._read_line()

    def _read_line(self):
        for line in self.process.stdout:
            if line.startswith("kv_pool "):
                return bytes.fromhex(line.removeprefix("kv_pool "))
        raise AssertionError(f"the source has ended with {self.process.wait()}")

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def wake(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main():
    kind, *numbers = sys.argv[1:]
    num_blocks, block_bytes, seed = map(int, numbers)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from migration.backends.made_links import BACKENDS, make_rows, serve_bulk

    storage = make_rows(num_blocks, [block_bytes], 0, "x")
    storage.segments.owners[0][:] = make_bytes(num_blocks, block_bytes, seed).reshape(-1)
    backend = BACKENDS[kind](storage)
    backend.attach(lambda transfer_id, block_ids: None, None)
    with serve_bulk(backend) as server:
        print("kv_pool", server.address.encode().hex())
        print("kv_pool", backend.describe().hex(), flush=True)
        sys.stdin.read()
        backend.close()


if __name__ == "__main__":
    main()
