"""What a request asks of the host tier: `kv_transfer_params` of `{"kvstow": {"store": false}}`.

A hint only takes away from what is stored or loaded. So a hint cannot make a request read wrong KV,
as long as the tier still learns of a request's blocks from the first on, without a gap. A limit
on stores is fixed when kvstow begins to track the request (`TrackedRequest.max_stored_tokens`).
If it grew later, the tier would take later blocks for those that were left out.

vLLM lets no connector refuse a request, so a wrong hint is ignored with a warning. An operator who
wants an HTTP error instead starts the server with `--middleware
kvstow.vllm.hints.RefuseWrongHints`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, fields
from reprlib import repr as short_repr
from typing import Any

from kvstow import ConfigError
from kvstow.vllm.option_readers import option, read_choice, read_count, read_flag, read_option

logger = logging.getLogger("vllm." + __name__)

WHERE = "kv_transfer_params.kvstow"
# Clients choose the keys, so the number of warnings must have a bound.
MAX_WARNINGS = 100
# More hints are refused at once, because each takes time that all other requests wait.
MAX_HINTS = 100
# A longer body reaches vLLM unchecked.
MAX_BODY_BYTES = 32 << 20
# A body with hints has one of these: the key, the start of an escaped small letter, or the zero
# bytes of UTF-16 and UTF-32. Most bodies have none, and parsing takes time.
_SIGNS = b'"kvstow"', b"\\u006", b"\\u007", b"\0"

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(frozen=True)
class Hints:
    """The hints that a request may give.

    Attributes:
        store: whether kvstow stores the blocks that this request computes or hits. Blocks that it
            shares with other requests are stored for those.
        max_load_tokens: the most tokens that kvstow loads for this request. vLLM computes the rest.
        priority: `low` lets kvstow evict the blocks that only this request has stored before all
            others.
    """

    store: bool = option(True, read_flag)
    max_load_tokens: int | None = option(None, read_count(0))
    priority: str = option("normal", read_choice("normal", "low"))

    @classmethod
    def read(cls, params: object, refuse: Callable[[str, ConfigError], None]) -> Hints:
        """Return the hints in a request's `kv_transfer_params`, those that are wrong left out.

        Args:
            params: whatever the client sent.
            refuse: gets the name and the error of each hint that is wrong.
        """
        given = params.get("kvstow") if isinstance(params, dict) else None
        if given is None:
            return NO_HINTS
        if not isinstance(given, dict):
            names = ", ".join(known.name for known in fields(cls))
            kind = type(given).__name__
            refuse("", ConfigError(f"{WHERE} is a {kind}, and it must be an object with {names}"))
            return NO_HINTS
        if len(given) > MAX_HINTS:
            refuse("", ConfigError(f"{WHERE} has {len(given)} hints: pass {MAX_HINTS} at most"))
            return NO_HINTS
        values = {}
        for key, value in given.items():
            name = str(key)
            try:
                values[name] = read_option(cls, WHERE, name, value)
            except ConfigError as error:
                refuse(name, error)
        return cls(**values)


NO_HINTS = Hints()


@dataclass
class HintReader:
    """Reads the hints of requests, and warns once of each key that is wrong.

    Attributes:
        num_given: how often requests gave each hint, by its key in the statistics.
    """

    num_given: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)

    def read(self, params: object) -> Hints:
        """Return the hints in a request's `kv_transfer_params`."""
        hints = Hints.read(params, self._refuse)
        if hints is not NO_HINTS:
            for hint in fields(hints):
                self.num_given[f"{hint.name}_hints"] += getattr(hints, hint.name) != hint.default
        return hints

    def _refuse(self, name: str, error: ConfigError) -> None:
        self.num_given["wrong_hints"] += 1
        name = short_repr(name)
        if name not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(name)
            logger.warning("kvstow: ignored a hint of a request: %s", error)


class RefuseWrongHints:
    """ASGI middleware that answers a request with a wrong hint with HTTP status 400.

    It checks JSON bodies of up to 32 MiB. vLLM runs it before it checks API keys.
    """

    def __init__(self, app: Callable[[_Message, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass the call on to vLLM, unless the body has a wrong hint."""
        is_json = any(
            name == b"content-type" and b"json" in value.lower()
            for name, value in scope.get("headers") or ()
        )
        if scope["type"] != "http" or not is_json:
            return await self._app(scope, receive, send)
        messages, num_bytes = [await receive()], 0
        while messages[-1].get("more_body"):
            num_bytes += len(messages[-1].get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                break
            messages.append(await receive())
        else:
            error = _wrong_hint(b"".join(message.get("body", b"") for message in messages))
            if error is not None:
                return await _answer(send, error)

        async def replay() -> _Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)


def _wrong_hint(body: bytes) -> str | None:
    """Return the error of the first wrong hint in the body of a request."""
    if not any(sign in body for sign in _SIGNS):
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return None  # vLLM answers it
    errors: list[str] = []
    if isinstance(request, dict):
        Hints.read(request.get("kv_transfer_params"), lambda _, error: errors.append(str(error)))
    return errors[0] if errors else None


async def _answer(send: _Send, error: str) -> None:
    """Answer as vLLM answers a request that it refuses."""
    content = {"message": error, "type": "BadRequestError", "param": WHERE, "code": 400}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    body = json.dumps({"error": content}).encode()
    await send({"type": "http.response.body", "body": body})
