"""The Triton kernel in the interpreter, and compiled for a GPU that need not be present."""

import os
import random
import subprocess
import sys

import pytest
from integrations.attention.made_batch import check, make_batch

pytestmark = pytest.mark.triton


@pytest.fixture
def attend(monkeypatch):
    """Launch the kernel on CPU tensors in Triton's interpreter."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from kv_pool.integrations.attention import triton_attention

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Triton decides on import whether its own functions are interpreted.
    for module in (tl, tl.standard):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(member.fn))
    triton_attention.make_kernel.cache_clear()

    def launch(batch, window=None, num_splits=None):
        starts = np.cumsum([0, *batch.query_lens])
        scale = batch.query.shape[2] ** -0.5
        return triton_attention.attend_by_triton(
            batch.query,
            *batch.storage.get_caches(1),
            batch.tables,
            batch.seq_lens,
            starts,
            scale,
            window,
            num_splits,
        )

    yield launch
    triton_attention.make_kernel.cache_clear()


@pytest.mark.parametrize("layout", ["NHD", "HND", "FLASH", "SGLANG", "TRTLLM"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_it_equals_dense_attention(kind, layout, attend):
    seq_lens = [1, 9, 70]
    query_lens = {"decode": [1] * 3, "prefill": seq_lens, "mixed": [1, 3, 20]}[kind]
    batch = make_batch(seq_lens, query_lens, (6, 2), dtype="float32", layout=layout, head_size=20)
    check(batch, attend(batch), 1e-5)


@pytest.mark.parametrize("num_splits", [2, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_splits_are_merged(window, num_splits, attend):
    """The short sequence leaves splits empty."""
    batch = make_batch([150, 3], [1, 1], (4, 1), dtype="float32", block_size=16)
    check(batch, attend(batch, window, num_splits), 1e-5, window=window)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 60))]
)
def test_batches_of_any_shape_equal_dense_attention(seed, attend):
    rng = random.Random(seed)
    num_kv_heads = rng.randint(1, 2)
    seq_lens = [rng.randint(1, rng.choice([5, 90])) for _ in range(rng.randint(1, 3))]
    query_lens = [rng.choice([1, 1, rng.randint(1, length)]) for length in seq_lens]
    window = rng.choice([None, 1, 30])
    batch = make_batch(
        seq_lens,
        query_lens,
        (num_kv_heads * rng.randint(1, 5), num_kv_heads),
        head_size=rng.choice([8, 16, 20]),
        block_size=rng.choice([1, 3, 16]),
        layout=rng.choice(["NHD", "HND", "FLASH", "LHBNC"]),
        dtype="float32",
        seed=seed,
    )
    check(batch, attend(batch, window, rng.choice([1, 2])), 1e-5, window=window)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_pool.integrations.attention import triton_attention

for dtype in ("fp16", "bf16", "fp32"):
    for query_tokens in (1, 512):
        kernel = triton_attention.make_kernel.__wrapped__()
        constants = triton_attention.choose_constants(32, 8, 128, 16, query_tokens)
        kinds = dict.fromkeys(("query", "key_cache", "value_cache", "output"), f"*{dtype}")
        kinds |= dict.fromkeys(("block_tables", "seq_lens", "query_start_loc"), "*i32")
        kinds |= {"sum_logs": "*fp32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=kernel,
            signature={name: kinds.get(name, "i32") for name in kernel.arg_names},
            constexprs=constants,
            # As a launch finds them: pointers and strides are multiples of 16.
            attrs={
                (number,): [["tt.divisibility", 16]]
                for number, name in enumerate(kernel.arg_names)
                if name.endswith(("_stride", "query", "cache", "output"))
            },
        )
        options = {"num_warps": triton_attention.NUM_WARPS}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = compiled.asm["ptx"]
        # Products of 16-bit types are done by tensor cores, and K and V are loaded 16 bytes at a time.
        assert ("mma" in ptx) == (dtype != "fp32"), (dtype, query_tokens)
        assert "v4.b32" in ptx, (dtype, query_tokens)
        assert compiled.metadata.shared < 228 * 1024, compiled.metadata.shared
        print(dtype, query_tokens)
"""


def test_it_compiles_for_sm_90(tmp_path):
    """In a separate process: Triton cannot compile after it was imported to interpret."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
