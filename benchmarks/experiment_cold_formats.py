"""Measure the error of each block format in attention and in model output. See benchmarks/README.md."""

import math
import statistics
import sysconfig
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import make_parser, read_options, start_run, write_results
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kv_pool import BlockId
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block_hash import BlockHasher
from kv_pool.ids import RequestId
from kv_pool.integrations.attention import paged_attention
from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage
from kv_pool.integrations.transformers.cache import attend_over_blocks
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import Request
from kv_pool.storage.kv_storage import KVStorage
from kv_pool.tiers.formats import BlockFormat, make_format
from kv_pool.tiers.formats.block_format import BlockAxes, read_axes
from kv_pool.tiers.formats.scaled import INT8, ScaledFormat

CONTEXT, CONTINUATION = 448, 64
WINDOW = CONTEXT + CONTINUATION
OUTLIER_FACTOR, OUTLIER_PAIRS = 16.0, 2
SHARED_SCALES = {"int8 K token, V token": ("D", "D"), "int8 K channel, V channel": ("N", "N")}
"""Scale groups of int8 that were not chosen, for comparison."""

Row = dict[str, Any]
_queries: list[torch.Tensor] = []


def attend_and_record(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention over blocks that records its queries: (tokens, heads, head_size) per layer."""
    _queries.append(query[0].transpose(0, 1).clone())
    return attend_over_blocks(module, query, *args, **kwargs)


AttentionInterface.register("kv_pool_recorded", attend_and_record)


# ---- models ----------------------------------------------------------------------------------------


def make_model(seed: int) -> Any:
    """Return a model of 3 million parameters with bytes as tokens and random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.06,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def read_text() -> tuple[bytes, bytes]:
    """Return the standard library's modules for training, and a fifth of them for testing."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = [file for number, file in enumerate(files) if number % 5 == 0]
    rest = [file for file in files if file not in held_out]
    return b"".join(file.read_bytes() for file in rest), b"".join(file.read_bytes() for file in held_out)


def train(model: Any, text: bytes, num_steps: int, batch_size: int, seed: int) -> float:
    """Train next-byte prediction for some minutes. Return the mean loss of the last tenth, in nats."""
    data = torch.tensor(np.frombuffer(text, np.uint8).astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    model.train()
    losses = []
    for _ in range(num_steps):
        starts = torch.randint(len(data) - WINDOW, (batch_size,), generator=generator)
        batch = torch.stack([data[start : start + WINDOW] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    return statistics.fmean(losses[-max(1, num_steps // 10) :])


def add_outlier_channels(model: Any) -> None:
    """Scale some key channels up and the queries' down by the same factor; the function is unchanged.

    Rotary embeddings rotate channels d and d + head_size / 2 together, so both channels of a pair get the
    same factor. The pairs are those that rotate slowest, where trained models have outliers.
    """
    config = model.config
    head_size, per_key_head = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    pairs = range(head_size // 2 - OUTLIER_PAIRS, head_size // 2)
    channels = [channel for pair in pairs for channel in (pair, pair + head_size // 2)]
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for head, channel in product(range(config.num_key_value_heads), channels):
                attention.k_proj.weight[head * head_size + channel] *= OUTLIER_FACTOR
                for query_head in range(head * per_key_head, (head + 1) * per_key_head):
                    attention.q_proj.weight[query_head * head_size + channel] /= OUTLIER_FACTOR


# ---- one model, one block size ---------------------------------------------------------------------


def allocate_cold(like: KVStorage) -> KVStorage:
    """Return a storage of float16 for the blocks of the context."""
    sizes = (like.num_layers, like.num_kv_heads, like.head_size)
    return KVStorage.allocate(CONTEXT // like.block_size, like.block_size, *sizes, "float16")


class ColdPrefix:
    """A sequence whose first blocks are encoded and decoded repeatedly.

    The model computes in float32. Encoded blocks are float16, including "raw", the baseline.
    """

    def __init__(self, model: Any, token_ids: list[int], block_size: int) -> None:
        self.model = model
        pool = RunBlockPool(WINDOW // block_size + 2, True, block_size)
        storage = allocate_storage(model, pool.num_gpu_blocks, block_size)
        self.sequences = PagedSequences(KVCacheManager(pool), storage)
        self.request = Request(RequestId("r"), token_ids, BlockHasher("sha256", block_size=block_size))
        self.sequences.admit(self.request)
        self.compute(CONTEXT)
        self.slots = self.sequences.get_slots(self.request, 0, CONTEXT)
        self.prefix = [storage.read(layer, self.slots) for layer in range(storage.num_layers)]
        self.cold = allocate_cold(storage)
        for layer, (key, value) in enumerate(self.prefix):
            self.cold.write(layer, range(CONTEXT), key.numpy().astype("f2"), value.numpy().astype("f2"))

    def compute(self, num_tokens: int) -> torch.Tensor:
        """Return the logits of the next tokens, (num_tokens, vocabulary)."""
        cache = PagedCache(self.sequences, [self.request], [num_tokens], gathers=False)
        with torch.no_grad():
            logits: torch.Tensor = self.model(**cache.make_inputs()).logits[0]
        return logits

    def read_back(self, block_format: BlockFormat) -> None:
        """Encode and decode the prefix's blocks, and write the result into its slots."""
        cold, storage = self.cold, self.sequences.storage
        blocks = [
            np.frombuffer(cold.read_block(BlockId(block)), np.uint8) for block in range(cold.num_blocks)
        ]
        decoded = block_format.decode(block_format.encode(np.stack(blocks)))
        there = allocate_cold(cold)
        for block, row in enumerate(decoded):
            there.write_block(BlockId(block), row.tobytes())
        for layer in range(cold.num_layers):
            key, value = there.read(layer, range(CONTEXT))
            storage.write(layer, self.slots, key.astype("f4"), value.astype("f4"))

    def attend(self, queries: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the attention of the continuation's queries in each layer, over the slots' content."""
        table = self.sequences.manager.get_block_ids(self.request.request_id)
        storage = self.sequences.storage
        assert isinstance(storage, KVStorage)
        return [
            paged_attention(query, *storage.get_caches(layer), [table], [WINDOW], [0, CONTINUATION])
            for layer, query in enumerate(queries)
        ]

    def run_continuation(self) -> torch.Tensor:
        """Return log-probabilities at each token of the continuation, (CONTINUATION, vocabulary)."""
        self.request.num_computed_tokens = CONTEXT
        return self.compute(CONTINUATION).log_softmax(-1)


def measure(model: Any, prompts: list[list[int]], block_size: int, makers: dict[str, Any]) -> list[Row]:
    """Return a row for each format: means over the prompts and their continuations' tokens."""
    found: dict[str, list[Row]] = {name: [] for name in makers}
    bytes_per_block = {}
    for token_ids in prompts:
        cold = ColdPrefix(model, token_ids, block_size)
        cold.read_back(make_format("raw", cold.cold))
        _queries.clear()
        raw = cold.run_continuation()
        queries = list(_queries)
        attended = cold.attend(queries)
        targets = torch.tensor(token_ids[CONTEXT + 1 :])
        for name, make in makers.items():
            block_format = make(cold.cold)
            bytes_per_block[name] = block_format.encoded_bytes
            cold.read_back(block_format)
            errors = [
                float((lossy - exact).norm() / exact.norm())
                for lossy, exact in zip(cold.attend(queries), attended, strict=True)
            ]
            logs = cold.run_continuation()
            divergence = (raw.exp() * (raw - logs)).sum(-1)
            loss = -logs[:-1].gather(1, targets[:, None]).mean()
            found[name].append(
                {
                    "attention_error": statistics.fmean(errors),
                    "worst_layer": max(errors),
                    "top1": float((logs.argmax(-1) == raw.argmax(-1)).float().mean()),
                    "kl": float(divergence.mean()),
                    "loss": float(loss),
                }
            )
            # Restore the continuation's K and V of the raw run, for attention in the next format.
            cold.read_back(make_format("raw", cold.cold))
            cold.run_continuation()
    return [
        {
            "format": name,
            "block_size": block_size,
            "block_bytes": bytes_per_block[name],
            **{key: statistics.fmean(row[key] for row in rows) for key in rows[0]},
        }
        for name, rows in found.items()
    ]


def list_makers(low_rank: tuple[str, ...]) -> dict[str, Callable[[KVStorage], BlockFormat]]:
    makers: dict[str, Callable[[KVStorage], BlockFormat]] = {}
    for name in ("raw", "int8", "fp8", *low_rank):
        makers[name] = lambda storage, name=name: make_format(name, storage)  # type: ignore[misc]
    for name, groups in SHARED_SCALES.items():
        makers[name] = lambda storage, groups=groups: ScaledFormat("int8", read_axes(storage), INT8, *groups)  # type: ignore[misc]
    return makers


# ---- speed -----------------------------------------------------------------------------------------


def measure_rates(num_blocks: int, runs: int) -> list[Row]:
    """Return GB per second of processor time for blocks of 2 MiB: 32 layers, 8 heads of 128, 16 tokens."""
    rows = []
    for dtype in ("float16", "bfloat16", "float32"):
        storage = KVStorage.allocate(1, 16, 32 if dtype != "float32" else 16, 8, 128, dtype)
        axes: BlockAxes = read_axes(storage)
        noise = np.random.default_rng(0).standard_normal((num_blocks, axes.num_elements), np.float32)
        blocks = axes.from_floats(noise)
        for name in ("int8", "fp8", "low_rank"):
            block_format = make_format(name, storage)
            few = blocks[: num_blocks if name != "low_rank" else 1]
            encode_s, decode_s = [], []
            for _ in range(runs):
                start = time.process_time()
                encoded = block_format.encode(few)
                between = time.process_time()
                block_format.decode(encoded)
                encode_s.append(between - start)
                decode_s.append(time.process_time() - between)
            rows.append(
                {
                    "format": name,
                    "dtype": dtype,
                    "share": block_format.encoded_bytes / storage.block_bytes,
                    "encode_gb_per_s": few.nbytes / statistics.median(encode_s) / 1e9,
                    "decode_gb_per_s": few.nbytes / statistics.median(decode_s) / 1e9,
                }
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--train-steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=6, help="sequences per step")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--rated-blocks", type=int, default=4, help="blocks encoded at a time")
    parser.add_argument("--rate-runs", type=int, default=5, help="runs of each rate")
    options = read_options(parser, train_steps=4, prompts=1, rated_blocks=1, rate_runs=1)
    torch.set_num_threads(1)  # small tensors: more threads would only wait for each other
    steps, num_prompts = options.train_steps, options.prompts
    provenance = start_run(options, "torch", "transformers", "ml_dtypes")

    train_text, held_out = read_text()
    starts = np.random.default_rng(options.seed).integers(0, len(held_out) - WINDOW, num_prompts).tolist()
    prompts = [list(held_out[start : start + WINDOW]) for start in starts]
    trained = make_model(options.seed)
    loss = train(trained, train_text, steps, options.batch_size, options.seed)
    outliers = make_model(options.seed)
    outliers.load_state_dict(trained.state_dict())
    add_outlier_channels(outliers)
    models = {"random weights": make_model(options.seed + 1), "trained": trained, "with outliers": outliers}
    print(f"trained for {steps} steps, loss {loss:.2f} nats a byte (uniform: {math.log(256):.2f})")
    print(f"{CONTEXT} cold tokens, {CONTINUATION} computed after them, {num_prompts} prompts\n")

    rows = []
    print(f"{'':<64} {'attention':>10} {'worst':>7} {'top-1':>7} {'KL':>8} {'loss':>7}")
    print(
        f"{'model':<14} {'tokens':>7}  {'format':<25}{'bytes':>8} {'share':>6} {'error':>10} {'layer':>7} "
        f"{'agrees':>7} {'nats':>8} {'nats':>7}"
    )
    for name, model in models.items():
        model.set_attn_implementation("kv_pool_recorded")
        for block_size in (16, 64):
            low_rank = ("low_rank:0.25", "low_rank:0.5", "low_rank:0.75")
            found = measure(model, prompts, block_size, list_makers(low_rank))
            for row in found:
                row["model"] = name
                row["share"] = row["block_bytes"] / found[0]["block_bytes"]
                rows.append(row)
                print(
                    f"{name:<14} {block_size:>7}  {row['format']:<25}{row['block_bytes']:>8,} "
                    f"{row['share']:>6.1%} {row['attention_error']:>10.3%} {row['worst_layer']:>7.2%} "
                    f"{row['top1']:>7.1%} {row['kl']:>8.5f} {row['loss']:>7.3f}",
                    flush=True,
                )
    rates = measure_rates(options.rated_blocks, options.rate_runs)
    print("\nblocks of 2 MiB, GB of raw bytes per second of the processor's time, median")
    print("format    elements   share  encode  decode")
    for row in rates:
        print(
            f"{row['format']:<9} {row['dtype']:<9} {row['share']:>6.1%} {row['encode_gb_per_s']:>7.2f} "
            f"{row['decode_gb_per_s']:>7.2f}"
        )
    results = {"provenance": provenance, "train_loss": loss, "rows": rows, "rates": rates}
    write_results(options, results)


if __name__ == "__main__":
    main()
