"""The memory map in a terminal: what is printed, sign by sign and colour by colour."""

import io

import pytest
from adapter.made_pool import make, take
from rich.console import Console
from rich.style import Style

from kv_pool import InvalidArgumentError
from kv_pool.control.layout_cells import COLOURS, CellKind
from kv_pool.control.layout_text import Look, choose_look, draw_layout, print_layout


def make_sixteen():
    """Of every kind: runs 1-3, 4, 5-6 with 5 pinned; cached 7-8 and 13, empty 9 and 15-16; 12 and 14 in use."""
    pool = make(16, run_length=3)
    for sequence_id, num_blocks in enumerate([3, 1, 2, 2, 3, 1, 1, 1, 2], start=1):
        take(pool, sequence_id, num_blocks)
    pool.pin([5])
    pool.cache_prefix(4, [b"a", b"b"])
    pool.cache_prefix(7, [b"c"])
    pool.fork(1, 20, 2)
    for sequence_id in (4, 5, 7, 9):
        pool.free_sequence(sequence_id)
    return pool


def print_to_string(layout, num_columns=None, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    print_layout(layout, Console(file=stream, **{"width": 80, **options}), num_columns)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def get_map(text):
    """The lines between the first empty one and the second."""
    return text.split("\n\n")[1].splitlines()
