"""The client of ``plsc serve``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
import pybase64

from plsc.errors import DataError, OptionError
from plsc.storage.disk import read_record

Image = str | os.PathLike[str] | bytes
Answer = TypeVar("Answer")
_MOST_ANSWER = 2**26  # bytes
# Without user name and password, which would not be sent.
_SERVER = re.compile(r"https?://(\[[\w:.]+\]|[^\s@:/?#\[\]]+)(:\d{1,5})?(/[^\s?#]*)?", re.IGNORECASE)


class _Entry(TypedDict):
    id: int


class _Embedding(TypedDict):
    embedding: list[float]


class Client:
    """Access to a server of ``plsc serve``.

    An image is the content of a file (bytes), or its path. All methods raise DataError with the server's
    message. Threads may share a client: each request has its own connection.

    Args:
        url: address of the server.
        api_key: its key; by default the environment variable PLSC_API_KEY.
        timeout: seconds to wait for the server.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", api_key: str | None = None, timeout: float = 60.0
    ) -> None:
        if not _SERVER.fullmatch(url):
            raise OptionError(f"url is {url!r}; expected http(s)://HOST:PORT, without a user name")
        key = (os.environ.get("PLSC_API_KEY", "") if api_key is None else api_key).strip()
        if not (key.isascii() and key.isprintable()):  # http.client would show it in its error
            raise OptionError("the API key has a character that is not printable ASCII")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url, self._timeout = urllib.parse.urlsplit(url), timeout
        self._path = self._url.path.rstrip("/")

    def encode(self, image: Image) -> np.ndarray:
        """Return the L2-normalised embedding of an image, float32 [D]."""
        answer = self._typed(_Embedding, "POST", "/embed", _content(image))
        return np.array(answer["embedding"], np.float32)

    def compare(self, first: Image, second: Image, far: float | None = None) -> dict[str, Any]:
        """Return the cosine ``similarity`` of two images, and whether they are the ``same`` at a FAR.

        far: a FAR of the model's thresholds; by default that of the server.
        """
        images = [pybase64.b64encode(_content(one)).decode() for one in (first, second)]
        body = json.dumps({"images": images}).encode()
        of_json = {"Content-Type": "application/json"}
        return self._typed(dict[str, Any], "POST", _query("/compare", far=far), body, **of_json)

    def search(self, image: Image, k: int = 5, far: float | None = None) -> dict[str, Any]:
        """Return the nearest entries, ``results``, and the ``name`` of the first; "unknown" below the FAR."""
        return self._typed(dict[str, Any], "POST", _query("/search", k=k, far=far), _content(image))

    def enrol(self, name: str, image: Image) -> int:
        """Enrol an image under a name, and return the id of the entry; it is on disk then."""
        return self._typed(_Entry, "POST", _query("/entries", name=name), _content(image))["id"]

    def delete(self, number: int) -> None:
        """Delete an enrolled entry by its id."""
        self._typed(_Entry, "DELETE", f"/entries/{int(number)}")

    def about(self) -> dict[str, Any]:
        """Return the description of the model and its thresholds."""
        return self._typed(dict[str, Any], "GET", "/about")

    def _typed(
        self, kind: type[Answer], method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Answer:
        """Return the answer of the server; a page of another server is not taken for one."""
        content = self._request(method, path, body, **headers)
        return read_record(kind, content, f"the answer of {self._url.geturl()}", DataError)

    def _request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        if body is not None:
            headers = {"Content-Type": "application/octet-stream", **headers}
        is_secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(str(self._url.hostname), self._url.port, timeout=self._timeout)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent
                connection.request(method, self._path + path, body, {**self._headers, **headers})
            response = connection.getresponse()
            content = response.read(_MOST_ANSWER + 1)  # more is refused
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise DataError(
                f"{self._url.geturl()} does not answer ({reason}); is plsc serve running?"
            ) from error
        finally:
            connection.close()
        if not 200 <= response.status < 300:  # a redirection, too: nothing was done
            raise DataError(
                f"{self._url.geturl()}{path.partition('?')[0]}: {_detail(response.status, content)}"
            )
        return content


def _content(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    return Path(image).read_bytes()


def _query(path: str, **values: Any) -> str:
    given = {name: value for name, value in values.items() if value is not None}
    return f"{path}?{urllib.parse.urlencode(given)}" if given else path


def _detail(status: int, content: bytes) -> str:
    try:
        return f"{json.loads(content)['detail']} (status {status})"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
