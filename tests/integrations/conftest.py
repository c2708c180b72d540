"""Fixtures of the integrations' tests."""

import logging

import pytest


@pytest.fixture
def no_warnings(caplog):
    """Leave out vLLM's warnings on small blocks and refused resets."""
    for name in ("vllm", "kv_pool"):
        caplog.set_level(logging.CRITICAL, name)
