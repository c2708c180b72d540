"""Damages of a structure, each with the invariant that it breaks."""

import pytest


def damages(*cases):
    """Run a test with each `damage`, a function, and the name of the invariant that is `broken`."""
    names = [f"{damage.__name__}-{broken}" for damage, broken in cases]
    return pytest.mark.parametrize(("damage", "broken"), cases, ids=names)
