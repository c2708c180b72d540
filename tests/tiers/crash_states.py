"""What may be on a disk after its power was cut: any of the writes that nobody waited for, or not."""

import os
from contextlib import contextmanager

import numpy as np

FILES = ("headers", "blocks")


class WriteLog:
    """The writes to a tier's files, those made durable by an fsync and the others, file by file.

    Attributes:
        durable: per file what is on the disk for certain.
        waiting: per file the writes since, in order: (offset, bytes), or (length, None) for a truncation.
    """

    def __init__(self, folder):
        self.folder = folder
        self.durable = dict.fromkeys(FILES, b"")
        self.waiting = {name: [] for name in FILES}

    @contextmanager
    def record(self):
        """Every `pwrite`, `ftruncate` and `fsync` of these files is carried out and noted meanwhile."""
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
        """What the files may hold after a power cut now: with all subsets of the waiting writes, or some."""
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
    """What a file holds after these writes."""
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
    """So many of these, or all."""
    return [items[place] for place in rng.permutation(len(items))[:num]]


def make_rng(seed):
    return np.random.default_rng(seed)
