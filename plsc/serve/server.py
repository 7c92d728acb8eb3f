"""Run the server of ``plsc serve``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
import warnings
from typing import Any

import torch

from plsc.errors import OptionError
from plsc.serve.options import ServeOptions
from plsc.serve.service import Service
from plsc.terminal import stop_signals

logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.001  # the thread of the batches waits less for the interpreter lock
_CONNECTIONS, _OTHER_FILES = 1024, 128  # at most open
_ACCEPTED = 16  # new connections per iteration of the event loop
# loggers of what any client can cause
_NOISY = ("asyncio", "uvicorn.error", "psycopg.pool", "plsc.serve.app", f"{__name__}.connections")


def serve(model: str, options: ServeOptions) -> None:
    """Serve an exported model until SIGINT, SIGTERM or SIGHUP, and then answer requests that have started.

    Raises:
        OptionError: a package is missing, or an option is wrong.
        CheckpointError: the model is damaged, or gallery or store are of another network.
        DataError: the gallery or the store cannot be used.
    """
    try:
        import fastapi  # noqa: F401
        import orjson  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise OptionError(
            f"the server needs a package that is not installed ({error}): pip install 'plsc[serve]'"
        ) from error
    from plsc.serve.app import HEADERS, create_app, is_loopback

    warnings.filterwarnings("ignore", module="PIL")  # thousands per image, of what any client can cause
    torch.set_num_threads(1)  # it only prepares small batches; onnxruntime has its own threads
    sys.setswitchinterval(_SWITCH_SECONDS)
    has_key, most = bool(options.api_key()), _most_connections()
    seldom = _Seldom()
    for name in _NOISY:
        logging.getLogger(name).addFilter(seldom)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(_CONNECTIONS)  # a longer queue than what asyncio accepts at a time

    uvicorn.server.HANDLED_SIGNALS = tuple(stop_signals())  # type: ignore[assignment] # of any number
    service = Service(model, options)
    with contextlib.closing(service), _listen(options) as listener:
        if not has_key and not is_loopback(options.host):
            logger.warning(f"everyone who can reach {options.host} may use the server; set --api_key_file")
        if service.far is None and options.fpir is None:
            logger.warning("the model has no thresholds, so nothing is called unknown; export it with pairs")
        host = f"[{options.host}]" if ":" in options.host else options.host
        logger.info(
            f"serving {model} on http://{host}:{listener.getsockname()[1]} (entries in {service.store.path})"
        )
        application = create_app(service)
        config = uvicorn.Config(
            application,
            http=_protocol(options.timeout, most),
            backlog=_ACCEPTED,
            log_config=None,
            access_log=False,
            ws="none",
            headers=HEADERS,
            server_header=False,
            timeout_keep_alive=int(options.timeout) + 1,
            # to receive a request, decode its image, embed it, and search or write
            timeout_graceful_shutdown=int(4 * options.timeout) + 1,
        )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                Server(config).run(sockets=[listener])
        finally:
            logger.info(f"stopped; requests without an answer: {application.unanswered}")


class _Seldom(logging.Filter):
    """Passes at most one message per second."""

    _due = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message."""
        now, due = time.monotonic(), self._due
        self._due = due if now < due else now + 1
        return now >= due


def _most_connections() -> int:
    """Return how many connections may be open, after raising the soft limit on open files if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(hard, _CONNECTIONS + _OTHER_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(_ACCEPTED, min(_CONNECTIONS, files - _OTHER_FILES))


def _protocol(timeout: float, most: int) -> Any:
    """Return uvicorn's protocol, changed: headers must arrive in time, and connections are limited.

    If more than `most` connections are open, one is closed that waits for its client: for a request, for the
    rest of one, or to send a response. It is the one from which nothing was received for the longest time.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    base: Any = H11Protocol
    opened: dict[Any, None] = {}  # in the order of their last data

    class Connection(h11.Connection):
        """Leaves a body with Transfer-Encoding unread: chunks of a byte would take seconds to parse."""

        _is_chunked = False

        def next_event(self) -> Any:
            event = h11.PAUSED if self._is_chunked else super().next_event()
            if isinstance(event, h11.Request):
                self._is_chunked = b"transfer-encoding" in dict(event.headers)
            return event

    class Protocol(base):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.conn = Connection(h11.SERVER)
            self.timeout_keep_alive_task = self.loop.call_later(timeout, self.timeout_keep_alive_handler)
            opened[self] = None
            if len(opened) > most:
                logging.getLogger(_NOISY[-1]).warning(f"{most} connections are open; an idle one is closed")
                idle = next(one for one in opened if one.waits())
                del opened[idle]
                idle.transport.abort()

        def waits(self) -> bool:
            """Return whether it is the client's turn."""
            cycle, unsent = self.cycle, self.transport.get_write_buffer_size()
            return bool(cycle is None or cycle.more_body or cycle.response_complete or unsent)

        def connection_lost(self, error: Exception | None) -> None:
            opened.pop(self, None)
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            """Stop the timer when the headers are complete, not at their first byte."""
            opened[self] = opened.pop(self, None)
            timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
            super().data_received(data)
            if timer is None:
                return
            has_request = self.cycle is not None and not self.cycle.response_complete
            if has_request or self.timeout_keep_alive_task is not None:
                timer.cancel()
            else:
                self.timeout_keep_alive_task = timer

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
