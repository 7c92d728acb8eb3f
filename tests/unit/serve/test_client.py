import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from plsc.errors import DataError, OptionError
from plsc.serve import Client

KEY = "k3y-0f-someone"


@pytest.fixture
def other():
    """A function that returns a client of a server, other than plsc serve, with this answer to all."""
    servers = []

    def answering(status, body=b""):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Location", "https://127.0.0.1/")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_DELETE = do_GET = do_POST  # noqa: N815 - as http.server calls them

            def log_message(self, *_):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return Client(f"http://127.0.0.1:{servers[-1].server_port}")

    yield answering
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", [(301,), (307,), (200, b"<h1>Log in</h1>"), (200, b"{}")])
def test_an_answer_of_a_proxy_is_not_taken_for_a_change(other, answer):
    client = other(*answer)
    for change in (lambda: client.delete(5), lambda: client.enrol("a", b"x")):
        with pytest.raises(DataError):
            change()


def test_an_answer_without_end_is_not_read_into_memory(other):
    client = other(200, b" " * (2**26 + 5))
    with pytest.raises(DataError, match="67108864"):
        client.about()


@pytest.mark.parametrize("key", [f"{KEY}\r\nX: 1", f"{KEY}\x00", f"{KEY}—"])
def test_a_key_that_no_header_can_have_is_not_in_the_error(key):
    with pytest.raises(OptionError, match="key") as caught:
        Client(api_key=key).about()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:{}@host", "http://me:a/{}@host", "ftp://{}@host"])
def test_a_url_with_a_password_is_refused_without_it(url):
    with pytest.raises(OptionError, match="url") as caught:
        Client(url.format(KEY))
    assert KEY not in str(caught.value)
