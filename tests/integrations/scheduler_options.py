"""`make_options`: a random configuration of vLLM's scheduler, as plain data.

Excluded, since vLLM 0.33's scheduler or manager raises an error with them:

- lookahead hashes without a full attention group: a window's lookup reads behind the last hash
- a threshold for long prompts below a decode step with drafts: its assertion on padded steps fails
- loads into Mamba states within a step: it needs more blocks than it has counted
- reports of all hits (`kv_cache_report_mode`) with hits within a block: the event reads behind the last hash
- sessions (`resumable`) with hits within a block: a waiting session has fewer hashes than its prompt has
- drafts by EAGLE with chunked local attention

Before 0.33 also:

- sessions with drafts: an accepted draft after a stop token counts as computed
- groups of a draft model whose hits drop no block: vLLM marks none then
- drafters with several modules and hits within a block: vLLM caches a state for fewer tokens than it covers
- in 0.30, connectors with Mamba states and async scheduling: a step needs more blocks than it has counted
"""

from math import ceil, gcd, lcm

from manager.manager_schedule import KINDS, full, make_groups, mamba, some_window

NEWEST = (0, 33)
SCHEDULER_KINDS = (
    *KINDS,
    "mamba",
    "full + mamba, finer hashes",
    "full + window + mamba",
    "window + mamba",
)


def make_scheduler_groups(kind, rng):
    unit = rng.choice([1, 2, 2, 4])
    if kind == "mamba":
        return [mamba(unit)]
    if kind == "full + mamba, finer hashes":
        size = unit * rng.choice([2, 3, 4])
        return [full(size), *(mamba(size) for _ in range(rng.randrange(1, 3)))][:: rng.choice([1, -1])]
    if kind == "full + window + mamba":
        return [full(unit), some_window(rng, unit), mamba(unit)][:: rng.choice([1, -1])]
    if kind == "window + mamba":
        return [some_window(rng, unit), mamba(unit)]
    return make_groups(kind, rng)


def make_options(kind, rng, release=NEWEST):
    """Return the options of a `SchedulerSide` for a release of vLLM; `kind` is one of `SCHEDULER_KINDS`."""
    groups = make_scheduler_groups(kind, rng)
    sizes = [group["block_size"] for group in groups]
    kinds = {group["kind"] for group in groups}
    alignment = lcm(*sizes)
    max_model_len = alignment * rng.randrange(6, 30) + rng.randrange(alignment)
    if kind == "full + uncached mamba":
        max_model_len = groups[1]["block_size"]  # one block per request, as in vLLM
    hash_block_size = gcd(*sizes)
    if kind == "full + mamba, finer hashes":
        hash_block_size = rng.choice(
            [size for size in (1, 2, 3, 4) if alignment % size == 0 and size < alignment]
        )
    is_decoder_only = "cross" not in kinds
    is_async = rng.random() < 0.4
    num_drafts = rng.choice([0, 0, 1, 2, 3]) if is_decoder_only else 0
    spec = make_speculation(num_drafts, kinds, alignment, rng) if num_drafts else None
    connector = make_connector(kinds, rng) if is_decoder_only and rng.random() < 0.35 else None
    budget = max_model_len if rng.random() < 0.3 else rng.randrange(alignment + 8, max_model_len + 20)
    max_running = rng.randrange(2, 9)
    if not is_decoder_only:
        budget = max(budget, max_model_len)
    for group in groups:
        if group["kind"] == "mamba" and num_drafts:
            group["speculative"] = num_drafts
        if group["kind"] == "window" and spec and spec["method"] == "mtp":
            group["extra_retained_tokens"] = num_drafts - 1
    mark_draft_group(groups, spec, rng)
    modes = {group.get("mode") for group in groups}
    is_cached = is_decoder_only and "none" not in modes and rng.random() < 0.93
    if "align" in modes:
        is_cached = True  # otherwise vLLM chooses the mode "none"
    options = {
        "kind": kind,
        "groups": groups,
        "hash_block_size": hash_block_size,
        "block_size": alignment,
        "num_blocks": choose_num_blocks(groups, max_model_len, num_drafts, rng),
        "retention_interval": choose_retention(kinds, alignment, rng),
        "max_model_len": max_model_len,
        "algorithm": rng.choice(["sha256", "sha256_cbor"]),
        "has_v2_runner": rng.random() < 0.5,
        "events": rng.random() < 0.8,
        "metrics": rng.random() < 0.3,
        "spec": spec,
        "connector": connector,
        "encoder_budget": rng.randrange(8, 40) if not is_decoder_only or rng.random() < 0.25 else 0,
        "is_encoder_decoder": not is_decoder_only,
        "has_sessions": is_decoder_only and kind != "full + mamba, finer hashes",
        "cache": {
            "enable_prefix_caching": is_cached,
            "enable_mamba_shared_prefix_checkpoint": "mamba" in kinds and rng.random() < 0.3,
        },
        "scheduler": {
            "max_num_seqs": max_running,
            "max_num_batched_tokens": max(budget, max_running),
            "long_prefill_token_threshold": choose_threshold(num_drafts, alignment, max_model_len, rng),
            "long_prefill_token_threshold_adaptive": rng.random() < 0.2,
            "enable_chunked_prefill": is_decoder_only,
            "async_scheduling": is_async,
            "watermark": rng.choice([0.0, 0.0, 0.01, 0.1]),
            "policy": rng.choice(["fcfs", "fcfs", "priority"]),
            "scheduler_reserve_full_isl": rng.random() < 0.5,
        },
    }
    if "align" in modes:
        options["cache"]["mamba_cache_mode"] = "align"
    if release < (0, 33):
        fit_release(options, release)
    return options


def fit_release(options, release):
    """Leave out what vLLM's scheduler of a release before 0.33 does not have, or fails with."""
    spec = options["spec"]
    if spec is not None:
        options["has_sessions"] = False
        if spec["method"] == "mtp" and options["kind"] == "full + mamba, finer hashes":
            spec["method"] = "eagle"
        if spec["disable_eagle_block_drop"]:
            for group in options["groups"]:
                group.pop("is_eagle_group", None)
    if release < (0, 31):
        if options["scheduler"]["async_scheduling"] and any(
            group["kind"] == "mamba" for group in options["groups"]
        ):
            options["connector"] = None
        del options["scheduler"]["long_prefill_token_threshold_adaptive"]
        cache = options["cache"]
        has_junctions = cache.pop("enable_mamba_shared_prefix_checkpoint")
        cache["enable_mamba_fine_grained_prefix_cache"] = has_junctions


def make_speculation(num_drafts, kinds, block_size, rng):
    methods = ["ngram", "eagle", "eagle"] if "chunked" not in kinds else ["ngram"]
    if "eagle" in methods and num_drafts > 1 and block_size >= num_drafts:
        methods.append("mtp")
    return {
        "method": rng.choice(methods),
        "num_speculative_tokens": num_drafts,
        "disable_eagle_block_drop": rng.random() < 0.1,
        "disable_lookahead_block_hashes": "full" not in kinds or rng.random() < 0.5,
    }


def make_connector(kinds, rng):
    return {
        "role": rng.choice(["kv_both", "kv_consumer", "kv_producer"]),
        "on_failure": rng.choice(["recompute", "fail"]),
        "has_divergent_hits": rng.random() < 0.3,
        "requires_delivery": rng.random() < 0.2,
        "is_async": "mamba" in kinds or rng.random() < 0.6,
    }


def mark_draft_group(groups, spec, rng):
    """Mark the group of the draft model's layers; with none, vLLM treats all groups as such."""
    if spec is None or spec["method"] == "ngram":
        return
    attention = [group for group in groups if group["kind"] in ("full", "window")]
    if attention and rng.random() < 0.6:
        rng.choice(attention)["is_eagle_group"] = True


def choose_retention(kinds, alignment, rng):
    if not kinds & {"window", "mamba"}:
        return rng.choice([None, 0])
    return rng.choice([None, 0, 0, rng.randrange(1, 6) * alignment])


def choose_threshold(num_drafts, alignment, max_model_len, rng):
    threshold = rng.choice([0, 0, alignment, 3 * alignment])
    return min(max(threshold, num_drafts + 1), max_model_len) if threshold else 0


def choose_num_blocks(groups, max_model_len, num_drafts, rng):
    """Return enough blocks for one request, at most for four; the engine checks this when it starts."""
    per_request = sum(
        ceil((max_model_len + 2 * num_drafts + 1) / group["block_size"]) + group.get("speculative", 0) + 2
        for group in groups
    )
    return 1 + per_request + int(rng.choice([0.1, 0.5, 1, 1, 3]) * per_request)
