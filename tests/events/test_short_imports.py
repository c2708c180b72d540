"""`from kv_pool.events import ...`: the same objects as in the modules that have them."""

import importlib
from pathlib import Path

import pytest

import kv_pool.events as events


def test_every_name_is_the_one_of_its_module():
    for module, names in events._NAMES_OF.items():
        for name in names:
            its_own = getattr(importlib.import_module(f"kv_pool.events.{module}"), name)
            assert getattr(events, name) is its_own, name


def test_what_can_be_imported_is_what_is_listed():
    assert sorted(events._MODULE_OF) == events.__all__
    assert set(events.__all__) <= set(dir(events))
    with pytest.raises(AttributeError, match="has no attribute 'Publisher'"):
        _ = events.Publisher
    with pytest.raises(ImportError, match="cannot import name 'Publisher'"):
        from kv_pool.events import Publisher  # noqa: F401


def test_no_name_is_a_modules():
    """An import of the module would put the module in the name's place."""
    modules = {path.stem for path in Path(events.__file__).parent.glob("*.py")}
    assert "publisher" in modules
    assert not modules & set(events.__all__)
