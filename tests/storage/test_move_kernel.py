"""The kernel as compiled for a GPU, which need not be present: the width of its loads and stores."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from storage.made_storage import allocate, make_way

pytestmark = pytest.mark.triton

THREADS = 4 * 32


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_pool.storage.copy_triton import NUM_WARPS, choose_word, make_kernel

signature = {"pieces": "*i64", "sources": "*i64", "targets": "*i64", "num_pieces": "i32", "num_items": "i32"}
programs = []
for told_alignment, piece_words in %s:
    alignment, word, word_bytes = choose_word(told_alignment)
    constants = {"word": word, "word_bytes": word_bytes, "piece_words": piece_words, "alignment": alignment}
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=make_kernel(), signature=types, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    programs.append(triton.compile(source, target=target, options={"num_warps": NUM_WARPS}).asm["ptx"])
print(json.dumps(programs))
"""

KINDS = [(16, 1024), (16, 4096), (4, 1024), (8, 1024), (2, 1024), (1, 1024)]
"""Alignments of the memory, and words of a piece."""


@cache
def compile_all_for_sm_90():
    """Compile in a separate process: after its interpreter has run, Triton cannot compile everything."""
    with TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": folder,
            "TRITON_DEFAULT_FP_FUSION": "1",  # otherwise Triton 3.9 warns that its default will change
        }
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-c", COMPILE % KINDS], env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    return dict(zip(KINDS, json.loads(done.stdout), strict=True))


def compile_for_sm_90(alignment, piece_words):
    return compile_all_for_sm_90()[alignment, piece_words]


def count_accesses(ptx):
    """Count each kind of load from and store to device memory in the program."""
    return Counter(re.findall(r"\b((?:ld|st)\.global[.\w]*)", ptx))


@pytest.mark.parametrize("piece_words", [1024, 4096])
def test_aligned_memory_is_copied_16_bytes_at_a_time(piece_words):
    found = count_accesses(compile_for_sm_90(16, piece_words))
    each = piece_words // THREADS // 4
    assert found["ld.global.v4.b32"] == found["st.global.v4.b32"] == each
    # The other loads: five columns of a piece and two block ids. There are no other stores.
    assert sum(found.values()) == 2 * each + 7


def test_all_loads_of_a_piece_precede_its_first_store():
    ptx = compile_for_sm_90(16, 4096)
    assert ptx.rindex("ld.global.v4.b32") < ptx.index("st.global.v4.b32")


@pytest.mark.parametrize(("alignment", "kind"), [(4, "b32"), (8, "b32"), (2, "b8"), (1, "b8")])
def test_unaligned_memory_is_copied_by_word_or_byte(alignment, kind):
    found = count_accesses(compile_for_sm_90(alignment, 1024))
    assert found[f"ld.global.{kind}"] == found[f"st.global.{kind}"] == 1024 // THREADS
    assert sum(found.values()) == 2 * 1024 // THREADS + 7


def test_pieces_cover_their_spans(monkeypatch):
    from kv_pool.storage.copy_triton import cut_into_pieces

    table = allocate(make_way("cpu", None), "L|2BNHD", 4, block_size=5).segments
    pieces = cut_into_pieces(table, table, 100)
    assert table.spans.tolist() == [240] * 4
    assert pieces[:, 4].tolist() == [100, 100, 40] * 4
    np.testing.assert_array_equal(pieces[::3, 0], table.bases)
    np.testing.assert_array_equal(pieces[2::3, 0], table.bases + 200)
    np.testing.assert_array_equal(pieces[:, :2], pieces[:, 2:4])


def test_a_dropped_storage_releases_its_memory(monkeypatch):
    import gc
    import weakref

    way = make_way("triton", monkeypatch)
    storage = allocate(way, "L|BNHC")
    storage.apply_moves([(0, 1)])
    memory = weakref.ref(storage.tensors[0])
    del storage
    gc.collect()
    assert memory() is None
