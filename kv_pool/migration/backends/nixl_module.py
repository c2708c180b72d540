"""NIXL, or an error that says how to get it. The only place that imports it."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from kv_pool.errors import MissingDependencyError, describe_install


class Nixl(NamedTuple):
    """What we use of NIXL.

    Attributes:
        api: the module `nixl._api`.
        errors: every exception of its own.
        final_errors: those after which a transfer writes nothing any more.
    """

    api: Any
    errors: tuple[type[Exception], ...]
    final_errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Import it.

    Raises:
        MissingDependencyError: it is not installed, or does not fit this machine.
    """
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise MissingDependencyError(
            f"reading blocks by NIXL needs the packages nixl and nixl-cu12, or nixl-cu13: {error}. "
            f"{describe_install('nixl')}, or without the CUDA packages that these bring along: "
            "pip install --no-deps nixl nixl-cu12"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # It tells of every agent on stdout, where a command's own output goes.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return Nixl(
        _api,
        tuple(
            kind
            for name, kind in vars(_bindings).items()
            if name.startswith("nixl") and isinstance(kind, type) and issubclass(kind, Exception)
        ),
        (_bindings.nixlRemoteDisconnectError, _bindings.nixlBackendError, _bindings.nixlCancelledError),
    )
