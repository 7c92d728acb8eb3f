"""Check each request before the application runs: host, origin, API key and bytes.

Requests for /embed go to its endpoint at once: with the routing of FastAPI, 64 clients get 1.5 times the
requests per second of a server with one forward per request, without it twice as many (benchmarks/serve.py).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from fastapi import Request, Response

Headers: TypeAlias = Mapping[bytes, bytes]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LONGEST_TYPE = 256
_HELD = 256 * 2**20  # bytes of all request bodies together


class Refused(Exception):
    """A request is answered with a status and a reason."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Guard:
    """An ASGI application that passes on only complete requests within the limits.

    Args:
        application: the application.
        embed: the endpoint of /embed.
        key: the API key; empty: none is needed.
        public: paths that need no key.
        hosts: accepted names of the host if there is no key, so that no web site can reach the server through
            a name of its own; None: any.
        max_bytes: of a request's body.
    """

    def __init__(
        self,
        application: Application,
        embed: Callable[[Request], Awaitable[Response]],
        key: str,
        public: frozenset[str],
        hosts: frozenset[str] | None,
        max_bytes: int,
    ) -> None:
        self._application = application
        self._embed = embed
        self._expected = f"Bearer {key}".encode() if key else b""
        self._public = public
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._held = 0
        self.unanswered = 0  # requests that were cancelled because the server was forced to stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        parts: list[bytes] = []  # of the body, which are held
        try:
            headers = dict(scope["headers"])
            scope["headers"] = list(headers.items())  # of a repeated one, only the checked value is used
            self._check(scope, headers)
            if scope["method"] == "POST":
                await self._read(receive, parts, headers)
                receive = _replay(parts[0], receive)
                if scope["path"] == "/embed":
                    response = await self._embed(Request(scope, receive))
                    return await response(scope, receive, send)
            await self._application(scope, receive, send)
        except Refused as error:
            await _refuse(error, send)
        except asyncio.CancelledError:
            self.unanswered += 1
            raise
        finally:
            self._held -= sum(map(len, parts))
        return None

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise Refused for a request from a web site, without the key, or with an unexpected body."""
        if self._expected:
            given = headers.get(b"authorization", b"")
            if scope["path"] not in self._public and not hmac.compare_digest(given, self._expected):
                raise Refused(401, "send the API key as the header Authorization: Bearer KEY")
        else:  # anyone who can connect may use the server, but not web sites through a visitor's browser
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if self._hosts is not None and re.sub(r":\d*\Z", "", host) not in self._hosts:
                raise Refused(
                    403, "the server accepts only the address it listens on as the host; see --host"
                )
            origin = headers.get(b"origin")
            if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
                raise Refused(403, "requests from other web sites are not accepted")
        if len(headers.get(b"content-type", b"")) > _LONGEST_TYPE:  # parsed in quadratic time
            raise Refused(400, f"the Content-Type has more than {_LONGEST_TYPE} bytes; shorten it")
        if b"transfer-encoding" in headers:  # the body, in chunks, is not parsed; see `server`
            raise Refused(411, "send the body with Content-Length, not with Transfer-Encoding")
        if headers.get(b"content-length", b"0") != b"0" and scope["method"] != "POST":
            raise Refused(400, f"{scope['method']} takes no body")

    async def _read(self, receive: Receive, parts: list[bytes], headers: Headers) -> None:
        """Read the body as one part. Raises Refused if it is too large or incomplete."""
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:  # h11 checks number and body
            raise Refused(413, f"the request has more than {self._max_bytes} bytes; shrink the image")
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the request is incomplete")
            parts.append(message.get("body", b""))
            self._held += len(parts[-1])
            if self._held > max(_HELD, self._max_bytes):
                raise Refused(429, "the server holds too many bytes; try again later")
            more = message.get("more_body", False)
        parts[:] = [b"".join(parts)]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns the body once, as one message."""
    is_read = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(error: Refused, send: Send) -> None:
    """Send an error, and close the connection, as the body may be unread."""
    body = json.dumps({"detail": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
