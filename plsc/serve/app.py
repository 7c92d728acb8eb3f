"""The HTTP side of the server: the check of each request, the endpoints, the page, and the start.

`Guard` checks host, origin, API key and bytes before the application runs. Requests for /embed go to their
endpoint at once: with the routing of FastAPI, 64 clients get 1.5 times the requests per second of a server
with one forward per request, without it twice as many (benchmarks/serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import re
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import orjson
import torch
import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from plsc.data.lines import decode_base64
from plsc.errors import CheckpointError, DataError, OptionError, kind_and_line
from plsc.gallery.store import LARGEST_ID, StoreError
from plsc.machine import stop_signals
from plsc.serve import ServeOptions
from plsc.serve.service import MOST_FOUND, Busy, Service, entry_name
from plsc.storage.disk import parse_json
from plsc.version import __version__

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
HEADERS = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]
HEADERS += [("Cross-Origin-Resource-Policy", "same-origin")]  # no web site shows thumbnails to its visitors
"""Headers of all responses."""

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}
_FILES = {"/": "index.html", "/page.js": "page.js", "/style.css": "style.css"}
_PUBLIC = frozenset({*_FILES, "/health", "/openapi.json"})
_LISTED = 1000  # entries per request
_MOST_COMMAS = 1000  # in a JSON body: base64 has none

STATUSES: dict[type[Exception], int] = {
    StoreError: 503,
    DataError: 400,
    OptionError: 400,
    CheckpointError: 500,
    Busy: 429,
}
"""Status of the response for an exception; a subclass is before its base."""

Far = Annotated[float | None, Query(description="FAR of the threshold; by default that of the server")]

Headers: TypeAlias = Mapping[bytes, bytes]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LONGEST_TYPE = 256
_HELD = 256 * 2**20  # bytes of all request bodies together
_SWITCH_SECONDS = 0.001  # the thread of the batches waits less for the interpreter lock
_CONNECTIONS = 512  # with more, uvicorn answers requests with 503; most systems allow 1024 open files
# loggers of what any client can cause
_NOISY = ("asyncio", "uvicorn.error", "psycopg.pool", "plsc.serve.app")


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
        finally:
            self._held -= sum(map(len, parts))
        return None

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise Refused for a request from a web site, without the key, or with an unexpected body."""
        needs_key = bool(self._expected) and scope["path"] not in self._public
        lacks_key = not hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
        # Without a key, anyone who connects may use the server, but no web site by a visitor's browser.
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        is_other_host = self._hosts is not None and re.sub(r":\d*\Z", "", host) not in self._hosts
        is_other_site = b"origin" in headers and origin.partition("://")[2] != host
        is_long = len(headers.get(b"content-type", b"")) > _LONGEST_TYPE  # parsed in quadratic time
        has_body = headers.get(b"content-length", b"0") != b"0"
        for is_wrong, status, detail in (
            (needs_key and lacks_key, 401, "send the API key as the header Authorization: Bearer KEY"),
            (not self._expected and is_other_host, 403, "the host is not that of --host"),
            (not self._expected and is_other_site, 403, "requests from other web sites are not accepted"),
            (is_long, 400, f"the Content-Type has more than {_LONGEST_TYPE} bytes; shorten it"),
            # The body, in chunks, is not parsed; see `_protocol`.
            (b"transfer-encoding" in headers, 411, "send the body with Content-Length, not in chunks"),
            (has_body and scope["method"] != "POST", 400, f"{scope['method']} takes no body"),
        ):
            if is_wrong:
                raise Refused(status, detail)

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


def create_app(service: Service) -> Guard:
    """Return the application of a service, with all limits."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="plsc",
        version=__version__,
        summary="Embed images, compare them, search for the nearest entries, and enrol new ones.",
        docs_url=None,  # it loads scripts from another host
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_images(app, service)
    _add_entries(app, service)
    _add_pages(app, service)
    for kind in STATUSES:
        app.add_exception_handler(kind, _answer)
    options = service.options
    hosts = frozenset({"localhost", "127.0.0.1", "[::1]", options.host, f"[{options.host}]"})
    return Guard(
        app,
        partial(_embed, service),
        key=options.api_key(),
        public=_PUBLIC,
        hosts=hosts if is_loopback(options.host) else None,
        max_bytes=options.max_bytes,
    )


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


async def _embed(service: Service, request: Request) -> Response:
    """Return the embedding of an image."""
    try:
        images, _ = await _read(request, 1)
        embedding = await service.embed(images[0])
    except tuple(STATUSES) as error:  # FastAPI may not be there to call `_answer`
        return await _answer(request, error)
    content = orjson.dumps({"embedding": embedding}, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, media_type="application/json")


def _add_images(app: FastAPI, service: Service) -> None:
    @app.post("/embed", summary="Return the embedding of an image")
    async def embed(request: Request) -> Response:
        return await _embed(service, request)

    @app.post("/compare", summary="Return the cosine similarity of two images")
    async def compare(request: Request, far: Far = None) -> Response:
        about = _threshold(service, far)
        images, _ = await _read(request, 2)
        first, second = await asyncio.gather(*map(service.embed, images))
        similarity = float(first.astype(np.float64) @ second)
        accepted = [known for known, cosine in service.model.thresholds.items() if similarity >= cosine]
        lowest = min(accepted, default=None)
        same = None if about["threshold"] is None else similarity >= about["threshold"]
        return JSONResponse({"similarity": similarity, "same": same, **about, "lowest_accepted_far": lowest})

    @app.post("/search", summary="Return the entries nearest to an image")
    async def search(
        request: Request, k: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 5, far: Far = None
    ) -> Response:
        about = _threshold(service, far, of_search=True)
        images, _ = await _read(request, 1)
        found = await service.search(await service.embed(images[0]), k)
        nearest = found[0]["similarity"] if found else -math.inf
        is_known = None if about["threshold"] is None else nearest >= about["threshold"]
        name = None if is_known is None else found[0]["name"] if is_known else "unknown"
        strangers = service.strangers(nearest) if found else None
        return JSONResponse(
            {"name": name, "known": is_known, **about, "strangers": strangers, "results": found}
        )


def _add_entries(app: FastAPI, service: Service) -> None:
    @app.post("/entries", status_code=201, summary="Enrol an image")
    async def enrol(request: Request, name: str | None = None) -> Response:
        images, given = await _read(request, 1)
        name = entry_name(name if given is None else given)
        number = await service.enrol(name, images[0])
        return JSONResponse({"id": number, "name": name}, 201)

    @app.get("/entries", summary="List enrolled entries, those with an id above `after`")
    def entries(
        after: Annotated[int, Query(ge=0, le=LARGEST_ID)] = 0,
        limit: Annotated[int, Query(ge=1, le=_LISTED)] = _LISTED,
    ) -> Response:
        rows = service.store.entries(after, limit)
        fields = ("id", "name", "enrolled", "mapped")
        listed = [dict(zip(fields, (*row[:3], bool(row[3])), strict=True)) for row in rows]
        return JSONResponse({"entries": listed, "count": len(service.store)})

    @app.delete("/entries/{number}", summary="Delete an enrolled entry")
    async def delete(number: int) -> Response:
        if not 0 < number <= LARGEST_ID or not await service.delete(number):
            return _missing(f"there is no entry {number}")
        return JSONResponse({"id": number})

    @app.get("/entries/{number}/thumbnail", summary="Return the picture of an enrolled entry")
    def entry_thumbnail(number: int) -> Response:
        picture = service.store.thumbnail(number) if 0 < number <= LARGEST_ID else None
        if not picture:
            return _missing(f"there is no picture of entry {number}")
        return Response(picture, media_type="image/jpeg")

    @app.get("/classes/{number}/thumbnail", summary="Return the picture of a class of the model")
    def class_thumbnail(number: int) -> Response:
        picture = service.model.thumbnail(number) if 0 <= number <= LARGEST_ID else None
        if not picture:
            return _missing(f"class {number} has no picture")
        return Response(picture, media_type="image/jpeg")


def _add_pages(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="Return status ok while the server works")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "waiting": len(service.embeddings)})

    @app.get("/about", summary="Describe the model, its thresholds and the limits")
    async def about() -> Response:
        model, options = service.model, service.options
        return JSONResponse(
            {
                "model": model.fingerprint,
                "image_shape": model.image_shape,
                "emb_size": model.emb_size,
                "accuracy": model.about.get("accuracy"),
                "far": service.far,
                "fpir": options.fpir,
                "holds": service.holds(),
                "warning": service.warning(),
                "thresholds": {f"{far:g}": cosine for far, cosine in model.thresholds.items()},
                "enrolled": len(service.store),
                "gallery": 0 if service.gallery is None else len(service.gallery),
                "gallery_is_classes": service.is_classes,
                "max_bytes": options.max_bytes,
                "max_pixels": options.max_pixels,
            }
        )

    for path, name in _FILES.items():
        app.add_route(path, _file(PAGE / name), include_in_schema=False)


def _file(path: Path) -> Any:
    async def serve(request: Request) -> Response:
        return FileResponse(path, headers=_PAGE_HEADERS)

    return serve


def _threshold(service: Service, far: float | None, of_search: bool = False) -> dict[str, Any]:
    """Return the threshold of a FAR, which is None if the model has none, and what it is of.

    Of a search, by default, it is that of the FPIR of the server, if it has one.
    """
    chosen = service.threshold_of_search() if of_search and far is None else None
    if chosen is not None:
        wanted = {"far": None, "fpir": service.options.fpir}
        return {**wanted, "expected_fpir": chosen[1], "threshold": chosen[0]}
    known = service.far if far is None else service.known_far(far)
    limit = None if known is None else service.model.thresholds[known]
    return {"far": known, **({"fpir": None} if of_search else {}), "threshold": limit}


async def _read(request: Request, count: int) -> tuple[Sequence[bytes], str | None]:
    """Return the images of a request, and the name, if any. Raises DataError unless there are `count`."""
    declared, body = request.headers.get("content-type", ""), await request.body()
    is_json = declared.partition(";")[0].strip().lower() == "application/json"
    if declared.startswith("multipart/"):
        raise DataError("the body is a form; send the content of the image as the body (curl --data-binary)")
    images, name = _from_json(body, count) if is_json else ([body], None)
    if len(images) != count or not all(images):
        empty = sum(not image for image in images)
        raise DataError(f"the request has {len(images)} images, {empty} of them empty; expected {count}")
    return images, name


def _from_json(body: bytes, count: int) -> tuple[list[bytes], str | None]:
    # What else was parsed is not kept: it may need many times the memory of the body.
    expected = '{"image": BASE64}' if count == 1 else '{"images": [BASE64, BASE64]}'
    try:
        if body.count(b",") > _MOST_COMMAS:  # to parse millions of values, nothing else runs for seconds
            raise ValueError(f"it has more than {_MOST_COMMAS} commas")
        fields = parse_json(body)
        texts = [fields.pop("image")] if count == 1 else fields.pop("images")
        if not isinstance(texts, list):  # a long string would be millions of texts
            raise ValueError("the images are not a list")
        name = fields.get("name")
        images = [decode_base64(text.encode(), pads=True) for text in texts]
        return images, name if name is None or isinstance(name, str) else ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"the JSON body is not {expected} ({kind_and_line(error):.200})") from error


async def _answer(request: Request, error: Exception) -> Response:
    """Return the response for an error of `STATUSES`."""
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    detail = str(error)[:500]
    if status == 503:  # names the machine of the database
        logger.warning(detail)
        detail = "the entries cannot be used now; try again, or see the server's log"
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"detail": detail}, status, headers)


def _missing(what: str) -> Response:
    return JSONResponse({"detail": what}, 404)


# Run it.


def serve(model: str, options: ServeOptions) -> None:
    """Serve an exported model until SIGINT, SIGTERM or SIGHUP, and then answer requests that have started.

    Raises:
        OptionError: an option is wrong.
        CheckpointError: the model is damaged, or gallery or store are of another network.
        DataError: the gallery or the store cannot be used.
    """
    warnings.filterwarnings("ignore", module="PIL")  # thousands per image, of what any client can cause
    torch.set_num_threads(1)  # it only prepares small batches; onnxruntime has its own threads
    sys.setswitchinterval(_SWITCH_SECONDS)
    has_key, log = bool(options.api_key()), logging.getLogger("plsc.serve")  # whose lines are not limited
    seldom = _Seldom()
    for name in _NOISY:
        logging.getLogger(name).addFilter(seldom)

    uvicorn.server.HANDLED_SIGNALS = tuple(stop_signals())  # type: ignore[assignment] # of any number
    service = Service(model, options)
    with contextlib.closing(service), _listen(options) as listener:
        if not has_key and not is_loopback(options.host):
            log.warning(f"everyone who can reach {options.host} may use the server; set --api_key_file")
        if service.far is None and options.fpir is None:
            log.warning(
                "the model has no thresholds, so nothing is called unknown: export it with data.val_targets"
            )
        host = f"[{options.host}]" if ":" in options.host else options.host
        log.info(
            f"serving {model} on http://{host}:{listener.getsockname()[1]} (entries in {service.store.path})"
        )
        config = uvicorn.Config(
            create_app(service),
            http=_protocol(),
            limit_concurrency=_CONNECTIONS,
            log_config=None,
            access_log=False,
            ws="none",
            headers=HEADERS,
            server_header=False,
            timeout_keep_alive=int(options.timeout) + 1,
            # to decode an image, embed it, and search or write, and for the client to send it
            timeout_graceful_shutdown=int(4 * options.timeout) + 1,
        )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            log.info("stopped")


class _Seldom(logging.Filter):
    """Passes at most one message per second."""

    _due = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message."""
        now, due = time.monotonic(), self._due
        self._due = due if now < due else now + 1
        return now >= due


def _protocol() -> Any:
    """Return uvicorn's protocol, but a body with Transfer-Encoding stays unread; the guard answers 411.

    To parse chunks of one byte, nothing else would run for seconds.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(h11.Connection):
        _is_chunked = False

        def next_event(self) -> Any:
            event = h11.PAUSED if self._is_chunked else super().next_event()
            if isinstance(event, h11.Request):
                self._is_chunked = b"transfer-encoding" in dict(event.headers)
            return event

    class Protocol(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.conn = Connection(h11.SERVER)

    return Protocol


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it each response takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OptionError(
            f"cannot listen on {options.host} port {options.port} ({error.strerror}); choose another --port"
        ) from error
    return listener
