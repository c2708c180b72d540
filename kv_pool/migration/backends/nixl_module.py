"""Import of the optional NIXL package. No other module imports it."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from kv_pool.errors import MissingDependencyError, describe_install


class Nixl(NamedTuple):
    """The parts of NIXL in use.

    Attributes:
        api: the module `nixl._api`.
        errors: all exception classes of NIXL.
        final_errors: exceptions after which a transfer no longer writes.
    """

    api: Any
    errors: tuple[type[Exception], ...]
    final_errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Import NIXL.

    Raises:
        MissingDependencyError: NIXL is not installed or does not work on this machine.
    """
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise MissingDependencyError(
            f"NixlBackend needs the packages nixl and nixl-cu12, or nixl-cu13: {error}. "
            f"{describe_install('nixl')}, or without their CUDA dependencies: "
            "pip install --no-deps nixl nixl-cu12"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # NIXL logs every agent to stdout, which commands use for their output.
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
