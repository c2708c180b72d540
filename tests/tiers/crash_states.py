"""The possible contents of a disk after a power failure: any subset of the writes not yet synced."""

import os
from contextlib import contextmanager

import numpy as np

FILES = ("headers", "blocks")


class WriteLog:
    """A log of the writes to a tier's files, split into durable and pending ones.

    Attributes:
        durable: for each file, the content that an fsync has made durable.
        waiting: for each file, later writes in order: (offset, bytes), or (length, None) for a truncation.
    """

    def __init__(self, folder):
        self.folder = folder
        self.durable = dict.fromkeys(FILES, b"")
        self.waiting = {name: [] for name in FILES}

    @contextmanager
    def record(self):
        """Execute and record every `pwrite`, `ftruncate` and `fsync` of these files inside the block."""
        real = os.pwrite, os.ftruncate, os.fsync

        def pwrite(file, content, offset):
            num_written = real[0](file, content, offset)
            self._note(file, (offset, bytes(memoryview(content).cast("B")[:num_written])))
            return num_written

        def ftruncate(file, length):
            real[1](file, length)
            self._note(file, (length, None))

        def fsync(file):
            real[2](file)
            name = self._find_name(file)
            if name is not None:
                self.durable[name] = apply(self.durable[name], self.waiting[name])
                self.waiting[name] = []

        os.pwrite, os.ftruncate, os.fsync = pwrite, ftruncate, fsync
        try:
            yield
        finally:
            os.pwrite, os.ftruncate, os.fsync = real

    def list_states(self, rng, max_states):
        """Yield possible contents of the files after a power failure, with subsets of the pending writes."""
        waiting = [(name, write) for name in FILES for write in self.waiting[name]]
        num_all = 1 << len(waiting)
        if num_all <= max_states:
            chosen = [
                [bool(number >> place & 1) for place in range(len(waiting))] for number in range(num_all)
            ]
        else:
            chosen = (rng.random((max_states - 2, len(waiting))) < rng.random((max_states - 2, 1))).tolist()
            chosen += [[True] * len(waiting), [False] * len(waiting)]
        for is_there in chosen:
            done = [write for write, kept in zip(waiting, is_there, strict=True) if kept]
            yield {
                name: apply(self.durable[name], [write for of, write in done if of == name]) for name in FILES
            }

    def _note(self, file, write):
        name = self._find_name(file)
        if name is not None:
            self.waiting[name].append(write)

    def _find_name(self, file):
        path = os.readlink(f"/proc/self/fd/{file}")
        folder, name = os.path.split(path)
        return name if folder == str(self.folder) and name in FILES else None


def apply(content, writes):
    """Return a file's content after these writes."""
    content = bytearray(content)
    for place, data in writes:
        if data is None:
            del content[place:]
            content += bytes(place - len(content))
        else:
            content += bytes(max(0, place + len(data) - len(content)))
            content[place : place + len(data)] = data
    return bytes(content)


def choose(rng, items, num):
    """Return up to `num` random items."""
    return [items[place] for place in rng.permutation(len(items))[:num]]


def make_rng(seed):
    return np.random.default_rng(seed)
