"""`find_options`: the `kv_pool` object of a request to vLLM, and where it is. Imports no vLLM."""

from typing import Any, Final

from kv_pool.environment import LEVEL
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm_warnings import warn

FIELD: Final = "kv_pool"
"""The name of the object."""

ABSENT: Final = object()
"""The result for a request without the object."""

_CANNOT_RETAIN: Final = (
    "this engine runs vLLM's KV cache manager, which cannot retain; the operator enables retention with "
    f"VLLM_PLUGINS=kv_pool and {LEVEL}=manager, and the log names what level manager does not serve"
)
NO_MANAGER: Final = f"kv_pool: {_CANNOT_RETAIN}"
"""Why the options of all requests are refused under vLLM's own manager."""


def find_options(extra_args: Any) -> Any:
    """Return the `kv_pool` object in vLLM's `SamplingParams.extra_args`, undecoded; `ABSENT` without one.

    vLLM's API server puts a request's `vllm_xargs` there, and its `kv_transfer_params` under that name. The
    object may be in either; in `vllm_xargs` it is JSON text, because vLLM accepts no nested objects there.

    Raises:
        InvalidArgumentError: it is in both.
    """
    if not isinstance(extra_args, dict):
        return ABSENT
    return _choose(extra_args.get(FIELD, ABSENT), extra_args.get("kv_transfer_params"))


def find_place(extra_args: Any) -> str:
    """Return the place of the object below vLLM's `SamplingParams`, for messages; "" without one."""
    if not isinstance(extra_args, dict):
        return ""
    if FIELD in extra_args:
        return f"extra_args[{FIELD!r}]"
    params = extra_args.get("kv_transfer_params")
    return f"kv_transfer_params[{FIELD!r}]" if isinstance(params, dict) and FIELD in params else ""


def warn_of_unread_options(request: Any) -> None:
    """Warn if a request has options, which this engine does not read; once for each place of theirs."""
    params = getattr(request, "sampling_params", None)
    place = "" if params is None else find_place(params.extra_args)
    if place:
        warn(f"kv_pool ignores the options in {place}: {_CANNOT_RETAIN}")


def find_in_body(body: Any) -> Any:
    """Return the `kv_pool` object in the JSON of a request to vLLM's API server; see `find_options`."""
    if not isinstance(body, dict):
        return ABSENT
    arguments = body.get("vllm_xargs")
    found = arguments.get(FIELD, ABSENT) if isinstance(arguments, dict) else ABSENT
    return _choose(found, body.get("kv_transfer_params"))


def _choose(in_arguments: Any, transfer_params: Any) -> Any:
    in_transfer = transfer_params.get(FIELD, ABSENT) if isinstance(transfer_params, dict) else ABSENT
    if in_transfer is ABSENT:
        return in_arguments
    if in_arguments is not ABSENT:
        raise InvalidArgumentError(
            "kv_pool: sent in kv_transfer_params and in vllm_xargs; send it in one of them"
        )
    return in_transfer
