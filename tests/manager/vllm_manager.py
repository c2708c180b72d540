"""`VllmManagerSide`: vLLM's own `KVCacheManager`. Importing this needs an importable vLLM."""

import warnings
from typing import ClassVar

from manager.manager_operations import ManagerSide, ids, per_group

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # for vLLM's imports
    import torch
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.utils import hashing
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request, RequestStatus

from kv_pool.integrations.vllm.releases import find_release

RELEASE = find_release(vllm.__version__)


def make_spec(group):
    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    own = ("kind", "mode", "speculative", "checkpoint_alignment")
    sizes = {name: size for name, size in group.items() if name not in own}
    if group["kind"] == "full":
        return kv_cache_interface.FullAttentionSpec(**sizes, **shape)
    if group["kind"] == "window":
        return kv_cache_interface.SlidingWindowSpec(**sizes, **shape)
    if group["kind"] == "chunked":
        return kv_cache_interface.ChunkedLocalAttentionSpec(**sizes, **shape)
    if group["kind"] == "cross":
        return kv_cache_interface.CrossAttentionSpec(**sizes, **shape)
    if group["kind"] == "mamba":
        return kv_cache_interface.MambaSpec(
            **sizes,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=group["mode"],
            num_speculative_blocks=group.get("speculative", 0),
            num_prefill_checkpoint_blocks=int("checkpoint_alignment" in group),
            prefill_checkpoint_alignment=group.get("checkpoint_alignment"),
        )
    raise ValueError(group)


DENSE = {"interval": None, "eagle": [], "prefill_ahead": 0, "hash_ahead": 0, "junctions": False}


class VllmManagerSide(ManagerSide):
    EXPECTED_ERRORS: ClassVar = {}

    def make_manager(self, options):
        self.hash_function = hashing.get_hash_fn_by_name(options["algorithm"])
        kv_cache_utils.init_none_hash(self.hash_function)
        rules = options["rules"] or DENSE
        groups = [
            kv_cache_interface.KVCacheGroupSpec(
                [f"layer {number}"], make_spec(group), is_eagle_group=number in rules["eagle"]
            )
            for number, group in enumerate(options["groups"])
        ]
        return KVCacheManager(
            kv_cache_interface.KVCacheConfig(
                num_blocks=options["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=rules["interval"],
            ),
            max_model_len=options["max_model_len"],
            scheduler_block_size=options["scheduler_block_size"],
            hash_block_size=options["hash_block_size"],
            max_in_flight_tokens=options["max_in_flight_tokens"],
            enable_caching=options["caching"],
            enable_kv_cache_events=options["events"],
            watermark=options["watermark"],
            use_eagle=bool(rules["eagle"]),
            num_prefill_lookahead=rules["prefill_ahead"],
            **self.list_new_options(rules),
        )

    def list_new_options(self, rules):
        """Return the options that not every release has, or has under another name."""
        if RELEASE < (0, 31):
            return {"enable_mamba_fine_grained_prefix_cache": rules["junctions"]}
        options = {"enable_mamba_shared_prefix_checkpoint": rules["junctions"]}
        if RELEASE >= (0, 33):
            options["num_hash_lookahead_tokens"] = rules["hash_ahead"]
        return options

    def make_request(self, request_id, token_ids):
        params = SamplingParams(max_tokens=10_000)
        params.update_from_generation_config({}, eos_token_id=0)
        num_ahead = (self.options["rules"] or DENSE)["hash_ahead"]
        return Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=params,
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(
                self.options["hash_block_size"],
                self.hash_function,
                *([num_ahead] if num_ahead else []),  # unknown until vLLM 0.32
            ),
        )

    def append(self, request_id, token_ids):
        self.requests[request_id].append_output_token_ids(list(token_ids))
        self.name_hashes(request_id)

    def begin_step(self):
        copies, blocks = self.manager.take_kv_cache_block_copies()
        self.pool.free_blocks(blocks)
        self.manager.new_step_starts()
        return [list(copy) for copy in copies]

    def take_copies(self):
        copies, blocks = self.manager.take_kv_cache_block_copies()
        self.retained += blocks
        return [list(copy) for copy in copies]

    def look_up(self, request_id, max_num_tokens):
        request = self.requests[request_id]
        limit = [] if max_num_tokens is None else [max_num_tokens]  # unknown until vLLM 0.32
        blocks, num_tokens, junction = self.manager.get_computed_blocks(request, *limit)
        self.prefixes[request_id] = blocks, num_tokens
        request.shared_prefix_boundary = junction
        return [
            num_tokens,
            per_group(blocks.blocks, len(self.options["groups"])),
            junction if self.has_rules else 0,
        ]

    def allocate(self, request_id, num_new_tokens, is_admission, options):
        request = self.requests[request_id]
        blocks, num_hits = self.prefixes.pop(request_id) if is_admission else (None, 0)
        request.num_in_flight_tokens = options.get("in_flight", 0)
        request.status = RequestStatus.WAITING if is_admission else RequestStatus.RUNNING
        others = any(any(self.table_ids(other)) for other in self.requests if other != request_id)
        new_blocks = self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=blocks,
            num_lookahead_tokens=options.get("lookahead", 0),
            num_external_computed_tokens=options.get("external", 0),
            delay_cache_blocks=options.get("delay", False),
            num_encoder_tokens=options.get("encoder", 0),
            full_sequence_must_fit=options.get("fit", False),
            reserved_blocks=options.get("reserved", 0),
            has_scheduled_reqs=others,
        )
        if new_blocks is None:
            return None
        return per_group(new_blocks.blocks, len(self.options["groups"]))

    def table_ids(self, request_id):
        return [ids(blocks) for blocks in self.manager.get_blocks(request_id).blocks]
