"""`KVPoolConnector`: host and disk tiers for vLLM, as a KV connector.

--kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kv_pool.integrations.vllm.connector",
    "kv_connector_extra_config": {"host_bytes": "16GiB"}}'
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.integrations.vllm.connector.vllm_connector import KVPoolConnector
else:
    from kv_pool.lazy_names import export_lazily

    # Imported on use, since it imports vLLM and the rest of this package does not.
    __getattr__, __dir__ = export_lazily(
        __name__, {"kv_pool.integrations.vllm.connector.vllm_connector": ("KVPoolConnector",)}
    )

__all__ = ["KVPoolConnector"]
