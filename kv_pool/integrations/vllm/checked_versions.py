"""The versions of vLLM that were tested with kv_pool's classes."""

# Level -> version without local part ("0.33.0" includes 0.33.0+cpu) -> the day it was tested.
# `tests/integrations/check_vllm_release.py VERSION` tests a version and adds it.
CHECKED_VERSIONS = {
    "pool": {
        "0.30.0": "2026-11-23",
        "0.31.0": "2026-11-23",
        "0.32.0": "2026-11-23",
        "0.33.0": "2026-11-21",
    },
    "manager": {
        "0.30.0": "2026-11-23",
        "0.31.0": "2026-11-23",
        "0.32.0": "2026-11-23",
        "0.33.0": "2026-11-23",
    },
}


def is_checked(level: str, version: str) -> bool:
    """Return True if any build of this version was tested at this level."""
    return version.partition("+")[0] in CHECKED_VERSIONS.get(level, {})
