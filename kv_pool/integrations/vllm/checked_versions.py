"""The versions of vLLM that were tested with kv_pool's classes."""

# Version without local part ("0.33.0" includes 0.33.0+cpu) -> the day it was tested. To add a version, run
# the vLLM tests of tests/integrations and tests/core and run_vllm_suite.py against it.
CHECKED_VERSIONS = {
    "0.33.0": "2026-11-21",
}
