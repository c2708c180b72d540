"""`find_options`: the `kv_pool` object of a request to vLLM. Imports no vLLM."""

from typing import Any, Final

from kv_pool.errors import InvalidArgumentError

FIELD: Final = "kv_pool"
"""The name of the object."""

ABSENT: Final = object()
"""The result for a request without the object."""


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
