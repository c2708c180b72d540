"""Random `PrefixRules` and the settings of a drafter, as plain options for a `ManagerSide`.

Names of vLLM in parentheses.

    interval        the retention interval, None for all blocks (prefix_cache_retention_interval)
    eagle           the groups whose hits drop their last block (use_eagle, is_eagle_group)
    prefill_ahead   tokens that a drafter reads after a chunk of the prompt (num_prefill_lookahead)
    hash_ahead      tokens after a block that its hash covers (num_hash_lookahead_tokens)
    junctions       cache states at junctions within a block (enable_mamba_shared_prefix_checkpoint)
    details         fields of `RuleDetails`, for an older release
"""

from dataclasses import asdict

from kv_pool.integrations.vllm.releases import RULES

NEWEST = (0, 33)


def draw_rules(rng, groups, alignment):
    """Return random options for these groups."""
    kinds = {group["kind"] for group in groups}
    rules = {"interval": 0, "eagle": [], "prefill_ahead": 0, "hash_ahead": 0, "junctions": False}
    if kinds & {"window", "mamba"}:
        rules["interval"] = rng.choice([0, 0, None, alignment, 2 * alignment, 5 * alignment])
    else:
        rules["interval"] = rng.choice([0, None])
    drafter = rng.choice(["none", "none", "drops", "drops", "modules", "hashes"])
    if drafter == "hashes":
        # vLLM cannot look up windows and states by hashes that cover more than one token ahead.
        num_most = 1 if kinds - {"full"} else 3
        rules["hash_ahead"] = rules["prefill_ahead"] = rng.randrange(1, min(num_most, alignment) + 1)
    elif drafter != "none" and "chunked" not in kinds:
        rules["eagle"] = [number for number in range(len(groups)) if rng.random() < 0.5]
        if not rules["eagle"]:
            rules["eagle"] = list(range(len(groups)))
        rules["prefill_ahead"] = 1
        if drafter == "modules" and "mamba" not in kinds:
            rules["prefill_ahead"] = rng.randrange(1, min(alignment, 5) + 1)
        rules["junctions"] = rng.random() < 0.5
    return rules


def fit_release(groups, rules, release):
    """Leave out what an older release of vLLM lacks, or level `manager` does not serve with it."""
    if release >= NEWEST:
        return
    rules["details"] = asdict(RULES[release])
    if rules["hash_ahead"]:
        rules["hash_ahead"] = rules["prefill_ahead"] = 0
    if release < (0, 32):
        for group in groups:
            group.pop("checkpoint_alignment", None)


def add_extra_tokens(groups, rules):
    """Let windows keep the tokens that a drafter with several modules may compute again, as vLLM does."""
    for group in groups:
        if group["kind"] == "window":
            group["extra_retained_tokens"] = max(0, rules["prefill_ahead"] - 1)


def make_ruled_groups(kind, rng, make_groups):
    """Return groups of a kind, and the tokens per hash.

    Groups with states also have blocks of several hashes, whose parts can be hit, and states after drafts.
    """
    groups = make_groups(kind, rng)
    unit = None
    for group in groups:
        if group["kind"] == "window" and rng.random() < 0.1:
            group["sliding_window"] = 1
    if kind == "full + mamba":
        unit = rng.choice([1, 2, 2, 4])
        size = unit * rng.choice([1, 2, 3, 4])
        groups = [{"kind": "full", "block_size": size}]
        if rng.random() < 0.3:
            groups[0]["block_size"] = unit * rng.choice([1, 2])
        if rng.random() < 0.3:
            groups.append({"kind": "full", "block_size": size})
        if rng.random() < 0.25:
            window_size = rng.choice([unit, size])
            groups.append(
                {"kind": "window", "block_size": window_size, "sliding_window": rng.randrange(2, 20)}
            )
        if rng.random() < 0.1:
            groups = groups[1:]
        states = {
            "kind": "mamba",
            "block_size": size,
            "mode": "align",
            "speculative": rng.choice([0, 0, 1, 2, 3]),
        }
        if rng.random() < 0.4:
            states["checkpoint_alignment"] = rng.choice([1, 1, unit, 2 * unit])
        groups.extend(dict(states) for _ in range(rng.randrange(1, 3)))
        if len(groups) == 1:
            unit = None
        rng.shuffle(groups)
    return groups, unit


def split_for_states(schedule, sequence, start, num_new):
    """Return the tokens of a chunk, which ends where states are cached, as vLLM's scheduler decides it."""
    rules = schedule.rules
    unit = schedule.hash_block_size
    states = [group for group in schedule.groups if group["kind"] == "mamba"]
    block_size = states[0]["block_size"]
    is_partial = can_hit_parts(schedule.groups, unit)
    drops, ahead = bool(rules["eagle"]), rules["hash_ahead"]
    num_prompt, num_tokens = sequence.num_prompt_tokens, len(sequence.tokens)
    prefill_end = max(num_prompt, num_tokens - 1)
    if start >= prefill_end:
        return num_new
    end = start + num_new
    alignment = states[0].get("checkpoint_alignment")
    saved = find_checkpoint(prefill_end, unit if is_partial else block_size, drops, ahead)
    is_saved = (
        alignment is not None
        and end >= prefill_end
        and start % unit == 0
        and -(-end // block_size) - 2 > (start - 1) // block_size
        and start + unit <= saved < end
        and (saved - start) % alignment == 0
    )
    if end < prefill_end:
        aligned = end // block_size * block_size
        if aligned > start or block_size <= schedule.max_chunk:
            end = aligned
    last = 0 if is_saved else find_checkpoint(num_tokens, block_size, drops, ahead)
    tail = find_checkpoint(num_prompt, unit, drops, ahead) if is_partial and not is_saved else 0
    stops = [last, tail if last < tail < num_prompt else 0]
    if start % block_size and not is_saved:
        stops.append((start // block_size + 1) * block_size)
    junction = sequence.junction
    if start < junction < end:
        is_exact = rules["junctions"] and drops and is_partial and rules["prefill_ahead"] <= 1
        if is_exact and junction <= num_prompt:
            stops.append(junction)
        else:
            stops.append(start + (junction - start) // block_size * block_size)
    end = min([stop for stop in stops if start < stop < end], default=end)
    return max(0, end - start)


def find_checkpoint(num_tokens, unit, drops, ahead):
    """Return the last multiple of `unit` tokens that the same sequence can hit."""
    if drops:
        return max(0, num_tokens // unit * unit - unit)
    return max(0, (num_tokens - max(1, ahead)) // unit * unit)


def can_hit_parts(groups, unit):
    """Return whether hits can end within a block."""
    return (
        len(groups) > 1
        and any(group["kind"] == "mamba" and group["block_size"] > unit for group in groups)
        and all(group["kind"] in ("full", "mamba") or group["block_size"] == unit for group in groups)
    )
