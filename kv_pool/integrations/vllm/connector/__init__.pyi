# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.integrations.vllm.connector.vllm_connector import KVPoolConnector as KVPoolConnector
