"""`KVPoolConnector`: host and disk tiers for vLLM, as a KV connector.

--kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kv_pool.integrations.vllm.connector",
    "kv_connector_extra_config": {"host_bytes": "16GiB"}}'
"""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
