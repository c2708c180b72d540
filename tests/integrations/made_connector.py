"""`MadeConnector`: a KV connector without a store, which loads as many tokens as a request says.

The transfer parameters of a request:

- `num_external`: the leading tokens of the request that the store has
- `num_defers`: how often the connector answers that it does not know yet
- `delay_free`: whether the blocks of a finished request are sent before they are freed

The scheduler's side of vLLM's interface is complete; there is no worker's side. `log` has its calls, with the
block ids that the scheduler passed.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class MadeConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.num_groups = len(kv_cache_config.kv_cache_groups)
        self.num_deferred = {}
        self.manager = None
        self.log = []

    def bind_kv_cache_manager(self, kv_cache_manager):
        self.manager = kv_cache_manager

    @property
    def supports_divergent_local_hybrid_hits(self):
        return self.settings["has_divergent_hits"]

    @property
    def requires_kv_delivery(self):
        return self.settings["requires_delivery"]

    def get_loaded_kv_cache_group_ids(self, request):
        return tuple(range(self.num_groups))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        asked = request.kv_transfer_params or {}
        num_deferred = self.num_deferred.get(request.request_id, 0)
        self.log.append(["match", request.request_id, num_computed_tokens])
        if num_deferred < asked.get("num_defers", 0):
            self.num_deferred[request.request_id] = num_deferred + 1
            return None, False
        num_external = min(asked.get("num_external", 0), request.num_prompt_tokens - 1) - num_computed_tokens
        if num_external <= 0:
            return 0, False
        return num_external, self.settings["is_async"]

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        call = ["load" if num_external_tokens else "no load", request.request_id, num_external_tokens]
        call.append([list(ids) for ids in blocks.get_block_ids()])
        call.append(blocks.get_unhashed_block_ids_all_groups())
        self.log.append(call)

    def build_connector_meta(self, scheduler_output):
        state = scheduler_output.kv_connector_block_state
        tables = {name: state.get_block_ids(name) for name in sorted(state.req_ids)}
        self.log.append(["build", tables, state.boundary_state_offloads])
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        is_complete = request.get_finished_reason().name in ("STOP", "LENGTH")
        is_delayed = is_complete and bool((request.kv_transfer_params or {}).get("delay_free"))
        self.log.append(["send" if is_delayed else "finish", request.request_id, block_ids])
        return is_delayed, None

    def request_finished(self, request, block_ids):
        raise NotImplementedError("all groups are passed to request_finished_all_groups")

    def register_finished_partial_tail(self, request, block_ids, finished_partial_tails):
        self.log.append(["partial tail", request.request_id, block_ids, finished_partial_tails])
        return False

    def take_log(self):
        log, self.log = self.log, []
        return log

    # ---- the worker's half, never called -------------------------------------------------------

    def start_load_kv(self, forward_context, **options):
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **options):
        raise NotImplementedError

    def wait_for_save(self):
        raise NotImplementedError
