"""`OptionsCheck`: refuses requests with invalid `kv_pool` objects in vLLM's API server. Imports no vLLM."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from kv_pool.environment import has_level_manager
from kv_pool.errors import InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.integrations.vllm.request_options.options import (
    ABSENT,
    FIELD,
    NO_MANAGER,
    find_options,
    list_places_in_body,
    make_refusal,
    read_options,
)
from kv_pool.integrations.vllm_warnings import warn_if_unused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_FIELD_BYTES: Final = FIELD.encode()


class OptionsCheck:
    """ASGI middleware: answers requests with invalid `kv_pool` objects with status 400 and the reason.

    The answer has the form of vLLM's own errors. Other requests reach the application unchanged. Only bodies
    that contain the bytes `kv_pool` are decoded. The engine checks the objects again: a request may reach it
    without the API server.

    `VLLM_PLUGINS=kv_pool` installs it; in a vLLM without endpoint plugins use `--middleware
    kv_pool.integrations.vllm.request_options.http_check.OptionsCheck`.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        warn_if_unused()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Check the body of a POST request; pass everything else on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        refusal = find_refusal(b"".join([message.get("body", b"") for message in messages]))
        if refusal is not None:
            await _send_error(send, refusal)
            return
        messages.reverse()

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)


def find_refusal(body: bytes) -> str | None:
    """Return why the `kv_pool` object in a request's body is refused; None if it is valid or absent."""
    if _FIELD_BYTES not in body:
        return None
    try:
        decoded = msgspec.json.decode(body)
    except UNDECODABLE:
        return None  # the API server refuses it
    try:
        value = find_options(list_places_in_body(decoded))
        if value is ABSENT:
            return None
        read_options(value)
    except InvalidArgumentError as error:
        return make_refusal(error)
    return None if has_level_manager() else NO_MANAGER


async def _send_error(send: Send, refusal: str) -> None:
    error = {"message": refusal, "type": "BadRequestError", "param": FIELD, "code": 400}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class OptionsEndpoints:
    """An endpoint plugin of vLLM; loaded if `VLLM_PLUGINS` names `kv_pool`. It adds no routes."""

    name = "kv_pool"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Install the check of `kv_pool` objects."""
        app.add_middleware(OptionsCheck)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep no state."""
