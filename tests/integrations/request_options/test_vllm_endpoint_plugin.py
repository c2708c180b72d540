"""vLLM's API server loads the check of options if `VLLM_PLUGINS` names kv_pool (marker `vllm`).

vLLM logs a warning if the variable is unset.
"""

import pytest
from integrations.vllm_process import write_metadata

from kv_pool.integrations.vllm.request_options.http_check import OptionsEndpoints

pytestmark = pytest.mark.vllm

WARNING = "Found endpoint plugin(s) ['kv_pool'] but VLLM_PLUGINS is not set."  # as in the guide


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that loads vLLM's endpoint plugins; it returns them, and the warnings."""
    write_metadata(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plugins = pytest.importorskip("vllm.plugins")
    records = []
    monkeypatch.setattr(plugins.logger, "warning", lambda text, *values: records.append(text % values))

    def load_with(names):
        if names is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", names)
        return plugins.load_endpoint_plugins(("generate",)), records

    return load_with


def test_plugin_is_loaded_by_name_only(load):
    (loaded,), records = load("other,kv_pool")
    assert isinstance(loaded, OptionsEndpoints)
    assert records == []


def test_unset_variable_is_a_warning_of_vllm(load):
    loaded, (message,) = load(None)
    assert loaded == []
    assert message.startswith(WARNING)


@pytest.mark.parametrize("names", ["", "other"])
def test_set_variable_without_kv_pool_is_no_warning(load, names):
    assert load(names) == ([], [])
