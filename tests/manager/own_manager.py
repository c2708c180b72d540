"""`OwnManagerSide`: kv_pool's `KVCacheManager`, as a `ManagerSide`."""

from typing import ClassVar

from manager.manager_operations import ManagerSide, ids, per_group

import kv_pool
from kv_pool.core import invariants
from kv_pool.manager.admission import AllocStatus
from kv_pool.manager.block_groups import kv_cache_spec
from kv_pool.manager.invariants import check_copies, check_references
from kv_pool.manager.prefix_rules import PrefixRules, RuleDetails

SPECS = {
    "full": kv_cache_spec.FullAttentionSpec,
    "window": kv_cache_spec.SlidingWindowSpec,
    "chunked": kv_cache_spec.ChunkedLocalAttentionSpec,
    "cross": kv_cache_spec.CrossAttentionSpec,
    "mamba": kv_cache_spec.MambaSpec,
}

FIELDS = {"speculative": "num_speculative_blocks", "checkpoint_alignment": "prefill_checkpoint_alignment"}

KEYWORDS = {
    "in_flight": "num_in_flight_tokens",
    "lookahead": "num_lookahead_tokens",
    "external": "num_external_computed_tokens",
    "delay": "delay_cache_blocks",
    "encoder": "num_encoder_tokens",
    "fit": "full_sequence_must_fit",
    "reserved": "reserved_blocks",
}


def make_spec(group):
    sizes = {FIELDS.get(name, name): size for name, size in group.items() if name not in ("kind", "mode")}
    if group.get("mode") == "none":
        sizes["has_states_at_block_ends"] = False
    return SPECS[group["kind"]](**sizes)


def make_rules(rules):
    return PrefixRules(
        retention_interval=rules["interval"],
        eagle_groups=rules["eagle"],
        num_reprefillable_tokens=max(0, rules["prefill_ahead"] - 1),
        junction_states=rules["junctions"],
        details=RuleDetails(**rules.get("details", {})),
    )


class OwnManagerSide(ManagerSide):
    EXPECTED_ERRORS: ClassVar = {}

    def make_manager(self, options):
        rules = options["rules"]
        num_ahead = rules["hash_ahead"] if rules else 0
        self.hasher = kv_pool.BlockHasher(
            options["algorithm"], block_size=options["hash_block_size"], num_lookahead_tokens=num_ahead
        )
        pool = kv_pool.BlockPool(
            options["num_blocks"],
            options["caching"],
            options["hash_block_size"],
            enable_kv_cache_events=options["events"],
            num_hash_lookahead_tokens=num_ahead,
        )
        return kv_pool.KVCacheManager(
            pool,
            groups=[make_spec(group) for group in options["groups"]],
            max_model_len=options["max_model_len"],
            max_in_flight_tokens=options["max_in_flight_tokens"],
            watermark=options["watermark"],
            prefix_rules=make_rules(rules) if rules else None,
        )

    def make_request(self, request_id, token_ids):
        return kv_pool.Request(request_id, token_ids, self.hasher)

    def begin_step(self):
        moves = self.manager.take_block_copies()
        assert self.has_rules or moves == []
        return [[move.source, move.target] for move in moves]

    def take_copies(self):
        moves, blocks = self.manager.take_block_copies_with_blocks()
        self.retained += blocks
        return [[move.source, move.target] for move in moves]

    def look_up(self, request_id, max_num_tokens):
        prefix = self.manager.get_computed_blocks(self.requests[request_id], max_num_tokens)
        self.prefixes[request_id] = prefix
        return [prefix.num_tokens, [ids(blocks) for blocks in prefix.blocks], prefix.junction]

    def allocate(self, request_id, num_new_tokens, is_admission, options):
        """Call `allocate_slots`, and compare it with the result of `can_allocate` before the call."""
        arguments = (
            self.requests[request_id],
            num_new_tokens,
            self.prefixes.pop(request_id) if is_admission else None,
        )
        keywords = {KEYWORDS[name]: value for name, value in options.items()}
        # Whether full blocks are cached at once does not affect whether the request fits.
        asked = {name: value for name, value in keywords.items() if name != "delay_cache_blocks"}
        status = self.manager.can_allocate(*arguments, **asked)
        new_blocks = self.manager.allocate_slots(*arguments, **keywords)
        assert (status is AllocStatus.OK) == (new_blocks is not None), status
        return None if new_blocks is None else per_group(new_blocks, len(self.options["groups"]))

    def table_ids(self, request_id):
        groups = range(len(self.options["groups"]))
        if not self.manager.holds_blocks(request_id):
            return [[] for _ in groups]
        return [self.manager.get_block_ids(request_id, group_id) for group_id in groups]

    def picture(self):
        if self.has_rules:
            check_references(self.manager, self.retained)
            check_copies(self.manager)
        invariants.check(self.pool)
        return super().picture()
