"""`CheckedModel`: the model runner of one rank of a complete vLLM; it checks every block that it reads."""

from integrations.vllm_connector.checked_engine import (
    Rank,
    call_connector,
    check_kv,
    make_spec,
    make_token,
    write_kv,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

NUM_BLOCKS = 100
SPECS = {
    "full.0": make_spec("full"),
    "full.1": make_spec("full"),
    "window.0": make_spec("window"),
    "window.1": make_spec("window"),
}
# The engine's calls to its workers and the required answers; all other calls return None.
ANSWERS = {
    "get_kv_cache_spec": SPECS,
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": NUM_BLOCKS * 2 * make_spec("full").page_size_bytes,
    "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
    "get_supported_tasks": ("generate",),
}


class CheckedModel:
    """Computes the KV of `checked_engine` on one rank, and calls its connector."""

    def __init__(self, vllm_config, cache_config, rank):
        self.cache_config = cache_config
        self.rank = Rank(vllm_config, cache_config, rank)
        self.tokens, self.tables = {}, {}

    def execute(self, output):
        started = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = [list(block_ids) for block_ids in new.block_ids]
            started[new.req_id] = new.num_computed_tokens
        more = output.scheduled_cached_reqs
        assert not more.resumed_req_ids
        for name, block_ids, num_computed in zip(
            more.req_ids, more.new_block_ids, more.num_computed_tokens, strict=True
        ):
            started[name] = num_computed
            for table, added in zip(self.tables[name], block_ids or (), strict=bool(block_ids)):
                table += added
        sampled = []
        for name, num_scheduled in output.num_scheduled_tokens.items():
            tokens, table, start = self.tokens[name], self.tables[name], started[name]
            check_kv(self.rank, self.cache_config, table, tokens, start, name)
            write_kv(self.rank, self.cache_config, table, tokens, start, start + num_scheduled)
            sampled.append([make_token(tokens)] if start + num_scheduled >= len(tokens) else [])
            tokens += sampled[-1]
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=call_connector(self.rank.connector, output, waits=False),
        )
