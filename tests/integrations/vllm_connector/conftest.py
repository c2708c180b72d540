"""Engines for the tests of the connector."""

import importlib
import warnings

import pytest


@pytest.fixture(scope="session")
def checked():
    """The module with the engine; importing it imports vLLM."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of vLLM's imports do not matter here
        return importlib.import_module("integrations.vllm_connector.checked_engine")


@pytest.fixture
def make_engine(checked, tmp_path):
    """Return a function that makes engines, which are closed at the end of the test."""
    made = []

    def make(host=20, disk=0, **options):
        extra = dict(options.pop("extra", {}))
        num_ranks = options.get("num_ranks", 1)
        if host:
            extra["host_bytes"] = checked.block_bytes(host, num_ranks)
        if disk:
            extra["disk_bytes"] = checked.block_bytes(disk, num_ranks)
            extra["disk_folder"] = str(tmp_path / "disk")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's configuration of a CPU
            made.append(checked.CheckedEngine(tmp_path, extra, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
