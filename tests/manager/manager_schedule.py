"""`ManagerSchedule`: the calls of a random engine to a manager, as plain operations for a `ManagerSide`.

Sequences arrive with shared prefixes, wait, are admitted (a lookup, then slots for a chunk), computed chunk
by chunk, decoded with and without drafts, preempted, aborted. Pools are small: slots are refused often.

Excluded, since no scheduler does it and vLLM does not define it, or its state is broken afterwards:

- `allocate_slots` with a prefix that was looked up before other calls, or for another sequence
- freeing a request without blocks: no effect in vLLM, an error in kv_pool
- no tokens at all: ValueError in vLLM, an empty result in kv_pool
- a lookup while the request holds blocks
"""

import random
from dataclasses import dataclass
from math import ceil, gcd, lcm

from core.plain_operations import has_raised
from manager.rule_options import (
    NEWEST,
    add_extra_tokens,
    draw_rules,
    fit_release,
    make_ruled_groups,
    split_for_states,
)

WAITING, LOADING, RUNNING = "waiting", "loading", "running"

MAX_REQUESTS = 8


def full(block_size):
    return {"kind": "full", "block_size": block_size}


def window(block_size, sliding_window):
    return {"kind": "window", "block_size": block_size, "sliding_window": sliding_window}


def chunked(block_size, attention_chunk_size):
    return {"kind": "chunked", "block_size": block_size, "attention_chunk_size": attention_chunk_size}


def mamba(block_size, mode="align"):
    return {"kind": "mamba", "block_size": block_size, "mode": mode}


def some_window(rng, block_size, *, other=0):
    """Return a random length, from two tokens to many blocks."""
    return window(block_size, rng.choice([2, 2, 3, *range(2, 6 * block_size + 2)]) + other)


def several_windows(rng, unit):
    groups = [full(unit), some_window(rng, unit), some_window(rng, unit, other=40), full(unit)]
    if rng.random() < 0.5:
        groups[1] = some_window(rng, 2 * unit)
    return groups[: rng.randrange(3, 5)]


def smaller_window_blocks(rng, unit):
    coarse = rng.choice([2, 2, 3, 4]) * unit
    return [full(coarse), some_window(rng, unit)][:: rng.choice([1, -1])]


KINDS = {
    "full": lambda rng, unit: [full(unit)],
    "full groups": lambda rng, unit: [full(unit) for _ in range(rng.randrange(2, 4))],
    "full groups of other sizes": lambda rng, unit: rng.choice(
        [[full(unit), full(2 * unit)], [full(3 * unit), full(unit), full(unit)]]
    ),
    "window": lambda rng, unit: [some_window(rng, unit)],
    "windows": lambda rng, unit: [some_window(rng, unit), some_window(rng, unit, other=40)],
    "full + window": lambda rng, unit: [full(unit), some_window(rng, unit)][:: rng.choice([1, -1])],
    "full + smaller window blocks": smaller_window_blocks,
    "full + larger window blocks": lambda rng, unit: [
        full(unit),
        some_window(rng, rng.choice([2, 3]) * unit),
    ],
    "full + windows": several_windows,
    "chunked": lambda rng, unit: [chunked(unit, rng.randrange(1, 6) * unit)],
    "full + chunked": lambda rng, unit: [full(unit), chunked(unit, rng.randrange(1, 6) * unit)],
    "full + cross": lambda rng, unit: [full(unit), {"kind": "cross", "block_size": unit}],
    "full + mamba": lambda rng, unit: [full(unit), *(mamba(unit) for _ in range(rng.randrange(1, 3)))],
    "full + uncached mamba": lambda rng, unit: [full(unit), mamba(rng.randrange(4, 25) * unit, "none")],
}


def make_groups(kind, rng):
    """Return the groups of a random configuration of this kind."""
    unit = rng.choice([1, 2, 2, 4])
    return KINDS[kind](rng, unit)


@dataclass
class Sequence:
    """One request, from the engine's point of view."""

    request_id: str
    tokens: list
    num_prompt_tokens: int
    state: str = WAITING
    num_computed: int = 0
    num_encoder_tokens: int = 0
    is_known: bool = False  # whether a new request object was created for it
    num_in_flight: int = 0  # of the computed tokens, those of a step that has not ended
    num_rejected: int = 0  # of these, drafts that will be rejected
    num_accepted: int = 0
    junction: int = 0

    @property
    def is_prefilling(self):
        return self.num_computed < len(self.tokens) - 1


class ManagerSchedule:
    """
    Args:
        has_rules: whether the manager has `PrefixRules`; without them it caches densely.
        release: the release of vLLM with these rules; an older one has fewer of them.
    """

    def __init__(self, kind, seed, has_rules=False, release=NEWEST):
        self.rng = rng = random.Random(f"{kind} {seed}{' rules' if has_rules else ''}")
        unit = rules = None
        if has_rules:
            self.groups, unit = make_ruled_groups(kind, rng, make_groups)
        else:
            self.groups = make_groups(kind, rng)
        sizes = [group["block_size"] for group in self.groups]
        self.kinds = {group["kind"] for group in self.groups}
        self.hash_block_size = unit or gcd(*sizes)
        self.alignment = lcm(*sizes)
        if has_rules:
            rules = draw_rules(rng, self.groups, self.alignment)
            fit_release(self.groups, rules, release)
            add_extra_tokens(self.groups, rules)
        self.rules = rules
        self.has_limits = release >= NEWEST
        self.has_drafts = rng.random() < 0.5 and (has_rules or "mamba" not in self.kinds)
        self.lookahead = rng.choice([1, 2, 5]) if self.has_drafts and rng.random() < 0.7 else 0
        self.max_drafts = min([3, *(group.get("speculative", 3) for group in self.groups)])
        if any("checkpoint_alignment" in group for group in self.groups):
            self.max_drafts = min(self.max_drafts, self.hash_block_size - 1)  # no checkpoint after drafts
        self.is_async = has_rules and rng.random() < 0.4
        if "mamba" in self.kinds and release < (0, 32):
            self.is_async = False
        self.defers_copies = has_rules and rng.random() < 0.4
        # vLLM then also caches the end of a prompt within a block, although no lookup uses it.
        self.has_partial_keys = not has_rules and any(
            group["kind"] == "full" and group["block_size"] > self.hash_block_size for group in self.groups
        )
        max_model_len = self.alignment * rng.randrange(4, 25) + rng.randrange(self.alignment)
        if kind == "full + uncached mamba":
            max_model_len = self.groups[1]["block_size"]  # one block per request, as in vLLM
        self.max_model_len = max_model_len
        per_request = sum(ceil(max_model_len / size) for size in sizes)
        num_blocks = 1 + rng.randrange(max(2, per_request // 3), rng.choice([1, 1, 3]) * per_request + 2)
        self.max_chunk = rng.choice(
            [max_model_len, max(self.alignment, max_model_len // rng.randrange(1, 9))]
        )
        self.options = {
            "groups": self.groups,
            "hash_block_size": self.hash_block_size,
            "scheduler_block_size": self.alignment,
            "num_blocks": num_blocks,
            "caching": kind not in ("full + cross", "full + uncached mamba") and rng.random() < 0.93,
            "max_model_len": max_model_len,
            "max_in_flight_tokens": rng.choice([None, self.max_chunk, self.max_chunk + self.lookahead]),
            "watermark": rng.choice([0.0, 0.0, 0.01, 0.1, 0.3]),
            "events": rng.random() < 0.3 and not self.has_partial_keys,
            "algorithm": rng.choice(["sha256_cbor", "sha256"]),
            "rules": rules,
        }
        self.has_states = "mamba" in self.kinds and not has_rules  # whose schedules are restricted
        self.fits_whole = 0.0 if self.has_states else rng.choice([0.0, 0.3, 1.0])
        self.has_loads = not self.has_states and "cross" not in self.kinds
        self.retained = 0
        self.sequences = {}
        self.num_requests = 0
        self.documents = [self.some_tokens(max_model_len) for _ in range(rng.randrange(1, 4))]

    def some_tokens(self, num_tokens):
        return [self.rng.randrange(5) for _ in range(num_tokens)]

    def of_state(self, *states):
        return [sequence for sequence in self.sequences.values() if sequence.state in states]

    def decide(self, side):
        """Yield operations; the result of each is sent back in, from the deciding side."""
        self.side = side
        rng = self.rng
        steps = {
            self.arrive: 8,
            self.admit: 14,
            self.compute: 40,
            self.finish_loading: 5,
            self.finish: 3,
            self.preempt: 2,
            self.look: 3,
            self.evict: 1,
            self.reset: 1,
            self.free_all_and_reset: 0.4,
            self.take_events: 1,
        }
        while True:
            (step,) = rng.choices(list(steps), list(steps.values()))
            yield from step()

    # ---- sequences arrive ------------------------------------------------------------------------

    def arrive(self):
        rng = self.rng
        if len(self.sequences) >= MAX_REQUESTS:
            return
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        document = rng.choice(self.documents)
        shared = document[: rng.randrange(len(document) + 1)]
        if rng.random() < 0.5:
            shared = shared[: len(shared) // self.alignment * self.alignment]
        num_own = rng.choice([0, 1, rng.randrange(1, 3 * self.alignment + 1)])
        tokens = (shared + self.some_tokens(num_own))[: self.max_model_len - 1] or [1]
        sequence = Sequence(request_id, tokens, len(tokens))
        if "cross" in self.kinds:
            sequence.num_encoder_tokens = rng.randrange(4 * self.alignment)
        self.sequences[request_id] = sequence
        yield ["request", request_id, list(tokens)]

    def look(self):
        waiting = self.of_state(WAITING)
        if not waiting:
            return
        sequence = self.rng.choice(waiting)
        num_most = len(sequence.tokens) - (self.rules["hash_ahead"] if self.rules else 0)
        limit = self.rng.choice([None, self.rng.randrange(max(0, num_most) + 1)])
        yield ["look_up", sequence.request_id, limit if self.has_limits else None]

    def admit(self):
        rng = self.rng
        waiting = self.of_state(WAITING)
        if not waiting:
            return
        sequence = rng.choice(waiting)
        num_tokens = len(sequence.tokens)
        if rng.random() < 0.6:
            yield from self.begin_step()
        limit = None
        if rng.random() < 0.1:
            limit = rng.randrange(num_tokens)
        limit = limit if self.has_limits else None
        num_hits, _, sequence.junction = yield ["look_up", sequence.request_id, limit]
        num_left = num_tokens - num_hits
        num_external = 0
        if self.has_loads and rng.random() < 0.2 and num_left > 1:
            num_external = rng.randrange(1, num_left)
            if rng.random() < 0.8:
                num_external -= (num_hits + num_external) % self.alignment
            num_external = max(0, num_external)
            if "mamba" in self.kinds and num_hits % self.alignment:
                num_external = 0
        if num_external and (rng.random() < 0.6 or "mamba" in self.kinds):
            options = {"external": num_external, "delay": True}
            if rng.random() < 0.3:
                options["reserved"] = rng.randrange(6)
            if rng.random() < self.fits_whole:
                options["fit"] = True
            answer = yield ["allocate", sequence.request_id, 0, True, options]
            if answer is not None:
                sequence.state = LOADING
                yield from self.count_computed(sequence, num_hits + num_external)
            return
        num_new = self.some_chunk(sequence, num_hits + num_external)
        if not num_new:
            return
        options = {}
        if num_external:
            options["external"] = num_external
        if self.lookahead and rng.random() < 0.9:
            options["lookahead"] = self.lookahead
        if rng.random() < self.fits_whole:
            options["fit"] = True
        if rng.random() < 0.1:
            options["reserved"] = rng.randrange(6)
        if rng.random() < 0.05 and "mamba" not in self.kinds:
            options["delay"] = True
        if sequence.num_in_flight:
            options["in_flight"] = sequence.num_in_flight
        if sequence.num_encoder_tokens:
            options["encoder"] = sequence.num_encoder_tokens
        answer = yield ["allocate", sequence.request_id, num_new, True, options]
        if answer is not None:
            sequence.state = RUNNING
            yield from self.count_computed(sequence, num_hits + num_external + num_new)
            if options.get("delay"):
                yield ["cache_blocks", sequence.request_id, rng.randrange(sequence.num_computed + 1)]

    def some_chunk(self, sequence, num_computed):
        """Return the number of tokens to compute next."""
        rng = self.rng
        num_left = max(len(sequence.tokens) - num_computed, 1)  # 1: for a token that is still in flight
        num_new = min(num_left, self.max_chunk)
        if rng.random() < 0.4:
            num_new = rng.randrange(1, num_new + 1)
        if "mamba" in self.kinds and self.options["caching"] and self.rules:
            return split_for_states(self, sequence, num_computed, num_new)
        if "mamba" in self.kinds and self.options["caching"]:
            # A chunk ends at a block boundary or at the end, since states are only kept there.
            end = num_computed + num_new
            last_full = (len(sequence.tokens) - 1) // self.alignment * self.alignment
            if num_computed < last_full:
                end = min(max(num_computed, end // self.alignment * self.alignment), last_full)
                num_new = end - num_computed
            else:
                num_new = num_left
        return num_new

    # ---- sequences run -----------------------------------------------------------------------------

    def count_computed(self, sequence, num_tokens):
        sequence.num_computed += num_tokens
        yield ["count_computed", sequence.request_id, num_tokens]
        if sequence.state == RUNNING and sequence.num_computed == len(sequence.tokens):
            yield from self.append(sequence, 1)

    def append(self, sequence, num_tokens):
        tokens = self.some_tokens(num_tokens)
        sequence.tokens.extend(tokens)
        yield ["append", sequence.request_id, tokens]

    def compute(self):
        rng = self.rng
        running = self.of_state(RUNNING)
        if not running:
            return
        if rng.random() < 0.5:
            running = [rng.choice(running)]
        yield from self.begin_step()
        for sequence in running:
            yield from self.settle(sequence)
            if sequence.state != RUNNING:
                continue  # preempted for one before it
            if len(sequence.tokens) >= self.max_model_len:
                yield from self.release(sequence, forget=True)
                continue
            num_drafts = 0
            num_new = self.some_chunk(sequence, sequence.num_computed)
            if not num_new:
                continue
            is_last = sequence.num_computed + num_new >= len(sequence.tokens)
            if is_last and self.has_drafts and rng.random() < 0.6:
                num_drafts = rng.randrange(self.max_drafts + 1)
                num_most = max(len(sequence.tokens), sequence.num_computed + num_new)
                num_drafts = max(0, min(num_drafts, self.max_model_len - 1 - num_most))
            options = {"lookahead": self.lookahead} if self.lookahead else {}
            if sequence.num_in_flight:
                options["in_flight"] = sequence.num_in_flight
            while True:
                answer = yield ["allocate", sequence.request_id, num_new + num_drafts, False, options]
                if answer is not None:
                    num_accepted = rng.randrange(num_drafts + 1)
                    if self.is_async:
                        yield from self.fly(sequence, num_new, num_drafts, num_accepted)
                        break
                    if num_accepted:
                        yield from self.append(sequence, num_accepted)
                    yield from self.count_computed(sequence, num_new + num_accepted)
                    break
                victim = rng.choice(self.of_state(RUNNING))
                yield from self.release(victim, forget=rng.random() < 0.2)
                if victim is sequence:
                    break

    def begin_step(self):
        """Begin a step; sometimes its copies end only later."""
        if self.retained and self.rng.random() < 0.5:
            yield ["free_copied"]
            self.retained = 0
        if self.defers_copies and self.rng.random() < 0.5:
            moves = yield ["take_copies"]
            self.retained += len(moves)
        yield ["begin_step"]

    def fly(self, sequence, num_new, num_drafts, num_accepted):
        """Count all tokens of a step as computed, before it is known which drafts are accepted."""
        yield ["count_computed", sequence.request_id, num_new + num_drafts]
        sequence.num_computed += num_new + num_drafts
        sequence.num_in_flight += num_new + num_drafts
        sequence.num_rejected += num_drafts - num_accepted
        sequence.num_accepted += num_accepted
        if self.rng.random() < 0.3:
            yield from self.settle(sequence, is_sure=True)

    def settle(self, sequence, is_sure=False):
        """End the sequence's steps in flight: append the accepted drafts, take back the others."""
        if not sequence.num_in_flight:
            return
        num_after = sequence.num_computed + 1 + self.max_drafts + self.lookahead
        if not is_sure and num_after < self.max_model_len and self.rng.random() < 0.6:
            return
        sequence.num_in_flight = 0
        if sequence.num_rejected:
            sequence.num_computed -= sequence.num_rejected
            yield ["count_computed", sequence.request_id, -sequence.num_rejected]
        if sequence.num_accepted:
            yield from self.append(sequence, sequence.num_accepted)
        sequence.num_rejected = sequence.num_accepted = 0
        num_unknown = sequence.num_computed + 1 - len(sequence.tokens)
        if num_unknown > 0:
            yield from self.append(sequence, num_unknown)

    def finish_loading(self):
        loading = self.of_state(LOADING)
        if not loading:
            return
        sequence = self.rng.choice(loading)
        if self.rng.random() < 0.15:  # the transfer failed
            yield from self.release(sequence, forget=self.rng.random() < 0.5)
            return
        yield ["cache_blocks", sequence.request_id, sequence.num_computed]
        sequence.state = RUNNING

    def release(self, sequence, *, forget):
        """Release the sequence's blocks; it waits again or ends."""
        if sequence.state != WAITING:
            yield ["free", sequence.request_id]
        sequence.state = WAITING
        sequence.num_computed = sequence.num_in_flight = sequence.num_rejected = sequence.num_accepted = 0
        if forget:
            if self.rng.random() < 0.3:
                self.documents = [*self.documents[-3:], list(sequence.tokens)]
            del self.sequences[sequence.request_id]
            yield ["forget", sequence.request_id]

    def finish(self):
        if self.sequences:
            yield from self.release(self.rng.choice(list(self.sequences.values())), forget=True)

    def preempt(self):
        running = self.of_state(RUNNING)
        if running:
            yield from self.release(self.rng.choice(running), forget=False)

    # ---- the cache as a whole ----------------------------------------------------------------------

    def evict(self):
        block_ids = range(1, self.options["num_blocks"])
        if self.has_partial_keys or self.has_states:  # vLLM would cache these ends of prompts again
            block_ids = sorted(
                block.block_id for block in self.side.pool.free_block_queue.get_all_free_blocks()
            )
        if block_ids:
            yield ["evict_blocks", sorted(set(self.rng.choices(block_ids, k=3)))]

    def reset(self):
        yield ["reset_prefix_cache"]

    def free_all_and_reset(self):
        for sequence in list(self.sequences.values()):
            yield from self.release(sequence, forget=self.rng.random() < 0.5)
        yield ["begin_step"]
        yield ["free_copied"]
        self.retained = 0
        answer = yield ["reset_prefix_cache"]
        assert answer is True or has_raised(answer)

    def take_events(self):
        yield ["take_events"]
