"""Forms that would occupy the event loop of the server."""

import asyncio

import pytest

from plsc.errors import DataError

app = pytest.importorskip("plsc.serve.app", reason="plsc[serve] is not installed")
START = b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n'


def images_in(content: bytes):
    async def receive():
        return {"type": "http.request", "body": START + content + b"\r\n--x--\r\n"}

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}
    return asyncio.run(app._from_form(app.Request(scope, receive), 1))[0]


def test_text_that_is_nearly_a_boundary_is_content():
    assert images_in(b"\r\n--xy" * 9) == [b"\r\n--xy" * 9]


def test_many_boundaries_are_refused_before_they_are_parsed():
    with pytest.raises(DataError, match="boundaries"):
        images_in(b"\r\n--xy" * 10**5)
