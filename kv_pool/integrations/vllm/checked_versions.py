"""The versions of vLLM whose code and tests have run with kv_pool's classes."""

# Version without local part ("0.33.0" stands for 0.33.0+cpu as well): the day it was checked. To add one,
# run the vLLM tests of tests/integrations and tests/core and run_vllm_suite.py against it.
CHECKED_VERSIONS = {
    "0.33.0": "2026-11-21",
}
