"""Run the server of ``plsc serve``."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
import warnings
from typing import Any

import torch

from plsc.errors import OptionError
from plsc.machine import stop_signals
from plsc.serve import ServeOptions
from plsc.serve.service import Service
from plsc.version import install

logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.001  # the thread of the batches waits less for the interpreter lock
_CONNECTIONS = 512  # with more, uvicorn answers requests with 503; most systems allow 1024 open files
# loggers of what any client can cause
_NOISY = ("asyncio", "uvicorn.error", "psycopg.pool", "plsc.serve.app")


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
            f"the server needs a package that is not installed ({error}): {install('serve')}"
        ) from error
    from plsc.serve.app import HEADERS, create_app, is_loopback

    warnings.filterwarnings("ignore", module="PIL")  # thousands per image, of what any client can cause
    torch.set_num_threads(1)  # it only prepares small batches; onnxruntime has its own threads
    sys.setswitchinterval(_SWITCH_SECONDS)
    has_key = bool(options.api_key())
    seldom = _Seldom()
    for name in _NOISY:
        logging.getLogger(name).addFilter(seldom)

    uvicorn.server.HANDLED_SIGNALS = tuple(stop_signals())  # type: ignore[assignment] # of any number
    service = Service(model, options)
    with contextlib.closing(service), _listen(options) as listener:
        if not has_key and not is_loopback(options.host):
            logger.warning(f"everyone who can reach {options.host} may use the server; set --api_key_file")
        if service.far is None and options.fpir is None:
            logger.warning(
                "the model has no thresholds, so nothing is called unknown: export it with data.val_targets"
            )
        host = f"[{options.host}]" if ":" in options.host else options.host
        logger.info(
            f"serving {model} on http://{host}:{listener.getsockname()[1]} (entries in {service.store.path})"
        )
        application = create_app(service)
        config = uvicorn.Config(
            application,
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
            logger.info(f"stopped; requests without an answer: {application.unanswered}")


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
