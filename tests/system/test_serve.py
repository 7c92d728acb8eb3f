"""`plsc serve` as a process: answers, hostile requests, shutdown, SIGKILL, and its messages."""

import asyncio
import base64
import contextlib
import io
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from plsc.cli import main
from plsc.errors import DataError
from plsc.export import open_model
from plsc.gallery import write_gallery
from plsc.gallery.store import New, Store
from tests.images import NAMES, UNSAFE_NAMES, photo
from tests.postgres_server import PASSWORD
from tests.serving import ROOT, Running, export_model, serving

pytest.importorskip("fastapi", reason="plsc-torch[serve] is not installed")
from plsc.serve import ServeOptions
from plsc.serve import service as service_module
from plsc.serve.service import Busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve")
    export_model(path)
    return path


@pytest.fixture(scope="module")
def images(folder):
    return [path.read_bytes() for path in sorted((folder / "faces/images").glob("*.png"))]


@pytest.fixture(scope="module")
def server(folder):
    flags = ("--timeout", "2", "--max_bytes", "400000")
    with (
        (folder / "log").open("w") as log,
        serving(folder / "model", folder / "shared.sqlite", *flags, stderr=log) as one,
    ):
        yield one


def ask(server, method, path, body=None, **headers):
    """Return the status and the JSON of a response."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content.startswith(b"{") else content


def test_concurrent_requests_in_all_forms_get_the_embedding_of_their_image(server, folder, images):
    model = open_model(folder / "model")
    expected = np.concatenate([model.embed(model.preprocess(image)[None]) for image in images])
    client = server.client()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(client.encode, images * 4))
    np.testing.assert_allclose(found, np.tile(expected, (4, 1)), atol=1e-5)
    text, safe = base64.b64encode(images[0]).decode(), base64.urlsafe_b64encode(images[0]).decode()
    lines = base64.encodebytes(images[0]).decode()
    assert text != safe
    forms = (
        text, f"{text}\n", lines, lines.replace("\n", "\r\n"), f"data:image/png;base64,{text}",
        f"DATA:;Base64,\n{lines}", text.rstrip("="), safe, safe.rstrip("="),
    )  # fmt: skip
    for status, answer in (
        ask(server, "POST", "/embed", images[0]),
        *(ask(server, "POST", "/embed", json.dumps({"image": one}), **JSON) for one in forms),
    ):
        assert status == 200
        np.testing.assert_allclose(answer["embedding"], expected[0], atol=1e-5)
    large = photo(Image.open(io.BytesIO(images[0])).resize((2000, 1500), Image.Resampling.NEAREST), 1, "PNG")
    expected = model.embed(model.preprocess(large)[None])[0]
    np.testing.assert_allclose(client.encode(large), expected, atol=1e-5)


def test_compare_decides_by_the_threshold_of_a_far(server, folder, images):
    thresholds = open_model(folder / "model").thresholds
    client = server.client()
    first, second = client.encode(images[0]), client.encode(images[5])
    answer = client.compare(images[0], images[5], far=0.1)
    assert answer["similarity"] == pytest.approx(float(first @ second), abs=1e-5)
    assert answer["threshold"] == thresholds[0.1]
    assert answer["same"] == (answer["similarity"] >= thresholds[0.1])
    assert client.compare(images[0], images[0])["same"]
    with pytest.raises(DataError, match=r"0\.5"):
        client.compare(images[0], images[0], far=0.5)


def test_what_is_unknown_is_enrolled_found_and_deleted(server):
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(noise, "PNG")
    client = server.client()
    before = client.search(noise.getvalue(), k=3)
    assert (before["name"], before["known"], before["strangers"]) == ("unknown", False, None)
    assert client.about()["warning"] is None
    assert [one["source"] for one in before["results"]] == ["class"] * 3
    number = client.enrol("Zoë 1", noise.getvalue())
    after = client.search(noise.getvalue(), k=3)
    first = after["results"][0]
    assert (after["name"], first["id"], first["source"]) == ("Zoë 1", number, "enrolled")
    assert first["similarity"] == pytest.approx(1, abs=1e-5)
    _, picture = ask(server, "GET", f"/{first['thumbnail']}")
    with urlopen(f"http://127.0.0.1:{server.port}/{first['thumbnail']}") as response:
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert Image.open(io.BytesIO(picture)).size == (16, 16)
    assert ask(server, "GET", "/entries")[1]["count"] == 1
    assert "/embed" in ask(server, "GET", "/openapi.json")[1]["paths"]
    client.delete(number)
    assert client.search(noise.getvalue(), k=3) == before
    with pytest.raises(DataError, match=f"{number}"):
        client.delete(number)


def test_names_that_people_have_are_enrolled_and_found_as_written(server, images):
    image = base64.b64encode(images[0]).decode()
    for name in NAMES:
        for path, body, headers in (
            (f"/entries?name={quote(name)}", images[0], {}),
            ("/entries", json.dumps({"image": image, "name": name}), JSON),
        ):
            status, answer = ask(server, "POST", path, body, **headers)
            assert (status, answer["name"]) == (201, name)
            assert ask(server, "GET", f"/entries?after={answer['id'] - 1}")[1]["entries"][0]["name"] == name
            server.client().delete(answer["id"])
    for name in UNSAFE_NAMES:
        body = json.dumps({"image": image, "name": name})
        status, answer = ask(server, "POST", "/entries", body, Content_Type="application/json")
        assert status == 400
        assert "name" in answer["detail"]
        assert answer["detail"].isascii()


def test_a_mapped_entry_is_found_among_others(folder, images, tmp_path):
    model = open_model(folder / "model")
    query = model.embed(model.preprocess(images[0])[None])[0]
    with contextlib.closing(Store(tmp_path / "s.sqlite", model.fingerprint, len(query))) as store:
        store.write([New("mapped", -query, b"", mapped="{}"), New("real", query, b"")])
    with serving(folder / "model", tmp_path / "s.sqlite") as server:
        client = server.client()
        found = {one["name"]: one for one in client.search(images[0], k=100)["results"]}
        assert (found["mapped"]["id"], found["mapped"]["mapped"], found["real"]["mapped"]) == (1, True, False)
        assert found["mapped"]["similarity"] == pytest.approx(-1, abs=1e-5)
        entries = ask(server, "GET", "/entries")[1]["entries"]
        assert [one["mapped"] for one in entries] == [True, False]


def without(folder, tmp_path, *names):
    """Return a copy of the model without parts of its description."""
    model = shutil.copytree(folder / "model", tmp_path / "model")
    about = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps({name: about[name] for name in about.keys() - {*names}}))
    return model


@pytest.fixture(scope="module")
def bare(folder, tmp_path_factory):
    """A server of a model without thresholds and classes, for images of at most 300 pixels."""
    place = tmp_path_factory.mktemp("bare")
    model = without(folder, place, "thresholds", "classes")
    with serving(model, place / "s.sqlite", "--max_pixels", "300") as one:
        yield one


def test_without_thresholds_the_name_is_null_with_and_without_entries(bare, images):
    client = bare.client()
    empty = client.search(images[0])
    client.enrol("a", images[0])
    found = client.search(images[0])
    assert (empty["name"], empty["known"], empty["results"]) == (None, None, [])
    assert (found["name"], found["known"], len(found["results"])) == (None, None, 1)


def png(width, height, more=()):
    """Return a PNG file that declares a size, with little data, and more chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(bytes(10**6))), (b"IEND", b"")]
    body = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


JSON = {"Content_Type": "application/json"}
RANDOM = np.random.default_rng(7).bytes(50_000)
HOSTILE = [
    # path, body, headers, a word of the reason
    ("/embed", RANDOM, {}, ""),
    ("/embed", b"", {}, "empty"),
    ("/embed", png(50_000, 50_000), {}, "pixels"),
    ("/search", png(10**9, 1), {}, "pixels"),
    ("/embed", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, ""),
    ("/embed", b'{"image": ', JSON, "line 1 column 11"),
    ("/embed", b'{"picture": "AAAA"}', JSON, "'image'"),
    ("/embed", b'{"image": ""}', JSON, "empty"),
    (
        "/embed",
        json.dumps({**dict.fromkeys(map(str, range(2000)), 1), "image": "AAAA"}).encode(),
        JSON,
        "JSON",
    ),
    ("/embed", b'{"image": "AA\\tAA"}', JSON, "base64"),
    ("/compare", b'{"images": 7}', JSON, "list"),
    ("/compare", b'{"images": ["AAAA"]}', JSON, "expected 2"),
    ("/compare", b'{"images": ["AAAA", ""]}', JSON, "empty"),
    ("/compare", json.dumps({"images": ["AAAA"] * 1000}).encode(), JSON, "1000"),
    ("/embed", b"--xyz\r\nx", {"Content_Type": "multipart/form-data; boundary=xyz"}, ""),
    ("/embed", bytes(400_001), {}, "400000 bytes"),
    ("/search?k=1000000", b"x", {}, ""),
    ("/search?far=nan", b"x", {}, "FAR"),
    ("/entries", b"x", {}, "name"),
    ("/entries?name=" + "x" * 201, b"x", {}, "name"),
    ("/entries?name=..%2F..%2Fetc%2Fpasswd", b"x", {}, "name"),
    ("/entries?name=Jos%E9", b"x", {}, "name"),
    ("/entries", b'{"image": "AAAA", "name": ["a"]}', JSON, "name"),
    ("/../../etc/passwd", b"x", {}, ""),
]


@pytest.mark.parametrize(("path", "body", "headers", "reason"), HOSTILE)
def test_a_hostile_body_gets_a_4xx_with_a_reason(path, body, headers, reason, server):
    status, answer = ask(server, "POST", path, body, **headers)
    assert 400 <= status < 500
    assert answer["detail"]
    assert reason in str(answer["detail"])


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"P6 8 8 255\n", 200), (b"P5 8 8 255\n", 200), (b"P5 8 8 65535\n", 200), (b"P6 8 8 254\n", 400),
        (b"P5 8 8 1000\n", 400), (b"P6 8 8 65535\n", 400), (b"P3 8 8 255\n", 400), (b"P1 8 8\n", 400),
        (b"P6 8 8 #\n255\n", 400), (b"BM", 400), (b"II*\0", 400), (b"GIF89a", 400),
    ],
)  # fmt: skip
def test_what_pillow_decodes_slowly_is_refused(header, status, server):
    body = header + (b"1 " if header[1:2] in b"123" else bytes(2)) * 200
    found, answer = ask(server, "POST", "/embed", body)
    assert found == status
    assert status == 200 or ("PPM" if header[:1] == b"P" else "JPEG") in answer["detail"]


LARGE, DROPPED = zlib.compress(bytes(200_000)), zlib.compress(b"\xff" * 9)


@pytest.mark.parametrize(
    ("kind", "data", "accepted", "refused"),
    [
        (b"zTXt", b"%d\0\0" + LARGE, 1, 3),
        (b"iTXt", b"%d\0\1\0\0\0" + LARGE, 1, 3),
        (b"iCCP", b"%d\0\0" + LARGE, 1, 9),
        (b"iTXt", b"%d\0\1\0\0\0" + DROPPED, 8, 9),  # not UTF-8: Pillow drops it
        (b"zTXt", b"%d\0\0", 8, 9),
    ],
)
def test_metadata_of_a_png_counts_towards_its_size(kind, data, accepted, refused, server):
    for count, status in ((accepted, 200), (refused, 400)):
        chunks = [(kind, data.replace(b"%d", b"%d" % number)) for number in range(count)]
        assert ask(server, "POST", "/embed", png(16, 16, chunks))[0] == status


def encoded(kind, size, **how):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind, **how)
    return file.getvalue()


def test_pixels_of_every_format_and_scans_of_a_jpeg_are_limited_to_max_pixels(bare):
    for kind in ("JPEG", "PNG"):
        assert ask(bare, "POST", "/embed", encoded(kind, (15, 20)))[0] == 200
        for width, height in ((16, 19), (300, 400)):  # the network's input is 16 x 16
            status, answer = ask(bare, "POST", "/embed", encoded(kind, (width, height)))
            assert status == 400
            assert f"{width}x{height} pixels" in answer["detail"]
    progressive = encoded("JPEG", (15, 17), progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    assert ask(bare, "POST", "/embed", progressive)[0] == 200
    status, answer = ask(bare, "POST", "/embed", progressive[:-2] + scan * 10 + progressive[-2:])
    assert (status, "long" in answer["detail"]) == (400, True)


def test_images_are_decoded_in_threads_and_one_that_takes_too_long_makes_room(
    folder, images, tmp_path, monkeypatch
):
    threads, end, decode_into = set(), threading.Event(), service_module.decode_into

    def slow(data, out):
        threads.add(threading.current_thread())
        if data != images[0]:
            end.wait(60)
        return decode_into(data, out)

    async def embed_all():
        first = await service.embed(images[0])
        failed = await asyncio.gather(*map(service.embed, images[1:3]), return_exceptions=True)
        return first, failed, await service.embed(images[0])

    monkeypatch.setattr(service_module, "decode_into", slow)
    options = ServeOptions(store=str(tmp_path / "s.sqlite"), timeout=3)
    with contextlib.closing(service_module.Service(str(folder / "model"), options)) as service:
        try:
            first, failed, again = asyncio.run(embed_all())
        finally:
            end.set()
    assert np.array_equal(first, again)
    assert [type(one) for one in failed] == [Busy, Busy]
    assert threading.main_thread() not in threads


def converse(server, request):
    """Return the status of a request, which may come before all was sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        return connection.makefile("rb").readline()[9:12]


def test_invalid_images_and_requests_do_not_fill_the_log(server, folder):
    tags = [(1000 + number, 1, 10**9, 8) for number in range(2600)]
    entries = b"".join(struct.pack("<HHII", *one) for one in tags)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    before = (folder / "log").stat().st_size
    assert ask(server, "POST", "/embed", encoded("JPEG", (20, 20), exif=exif))[0] == 200
    for _ in range(200):
        converse(server, b"nonsense\r\n\r\n")
    assert (folder / "log").stat().st_size < before + 3000


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/classes/..%2f..%2fmodel.json/thumbnail",
     "/classes/-1/thumbnail", f"/classes/{'9' * 300}/thumbnail", "/entries/99999999999999999999/thumbnail",
     "/page/page.js", "/nothing"],
)  # fmt: skip
def test_a_path_that_does_not_exist_gets_a_4xx(path, server):
    assert 400 <= ask(server, "GET", path)[0] < 500
    assert 400 <= ask(server, "DELETE", path)[0] < 500


def test_large_bodies_and_headers_are_cut_off(server):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    assert converse(server, head % b"Content-Length: 99999999999999\r\n") == b"413"
    assert converse(server, b"\x00\x01\x02 nonsense\r\n\r\n") == b"400"
    assert converse(server, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 10**6) == b"400"


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_behind_the_proxy_of_the_docs_chunks_are_accepted_and_slow_clients_do_not_reach_the_server(
    server, images, tmp_path
):
    text = (ROOT / "docs/gallery.md").read_text().partition("```nginx\n")[2].partition("```")[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = re.sub(r".*ssl_certificate.*\n", "", text).replace("443 ssl", f"127.0.0.1:{port}")
    text = text.replace(":8000", f":{server.port}").replace("16m", "1m")
    (tmp_path / "nginx.conf").write_text(
        f"error_log {tmp_path}/log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}/body;\n{text}}}"
    )
    settings = f"daemon off; master_process off; pid {tmp_path}/pid;"
    process = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-g", settings])
    try:
        proxy = Running(process, port)
        while not is_listening(proxy):
            assert process.poll() is None, (tmp_path / "log").read_text()
        assert ask(proxy, "POST", "/embed", iter([images[0]]))[0] == 200  # chunked
        assert ask(proxy, "POST", "/embed", bytes(2 * 2**20))[0] == 413
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        for one in slow:
            one.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        assert {one.recv(12) for one in slow[20:]} == {b"HTTP/1.1 503"}  # more than 20
        assert len(server.client().encode(images[0])) == 8
    finally:
        process.terminate()
        process.wait(60)


def test_the_server_still_serves_in_little_memory(server, images):  # after the hostile requests above
    client = server.client()
    assert len(client.encode(images[0])) == 8
    with pytest.raises(DataError, match="400000 bytes"):
        client.encode(bytes(10**7))  # refused before it is sent
    before = server.peak_megabytes()
    with ThreadPoolExecutor(8) as pool:
        huge = png(50_000, 50_000)
        for status, _ in pool.map(lambda _: ask(server, "POST", "/embed", huge), range(40)):
            assert 400 <= status < 500
    assert server.peak_megabytes() < before + 200


def test_a_web_site_cannot_use_the_server_of_its_visitor(server, images):
    for host in ("evil.example", "localhost:80:evil.example", "localhost.evil.example:80"):
        assert ask(server, "POST", "/embed", images[0], Host=host, Origin=f"http://{host}")[0] == 403
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert ask(server, "POST", "/embed", images[0], **headers)[0] == 403
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    assert ask(server, "POST", "/embed", images[0], **own)[0] == 200


@pytest.mark.parametrize("method", [b"POST /embed", b"GET /health"])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 5\r\n"])
def test_a_body_in_chunks_is_refused_before_it_is_parsed(server, length, method):
    head = method + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" + length + b"\r\n"
    for body in (b"0\r\n\r\n", b"1\r\nA\r\n" * 100, b"no chunk\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
            one.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = one.makefile("rb").read()
        assert (answer[9:12], answer.count(b"HTTP/1.1")) == (b"411", 1)


def test_a_long_content_type_is_not_parsed_and_of_a_repeated_header_only_the_checked_one(server, images):
    headers = {"Content-Type": 'multipart/form-data; boundary="' + ";" * 10_000}
    status, answer = ask(server, "POST", "/embed", images[0], **headers)
    assert (status, "Content-Type" in answer["detail"]) == (400, True)
    with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.putrequest("POST", "/embed")
        for kind in ("application/json", "image/png"):  # the first would be parsed unchecked
            connection.putheader("Content-Type", kind)
        connection.putheader("Content-Length", str(len(images[0])))
        connection.endheaders(images[0])
        assert connection.getresponse().status == 200


def ignore_other_signals():
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def test_sigterm_answers_started_requests_and_the_key_is_needed(folder, images, tmp_path):
    how = {"key": "secret", "preexec_fn": ignore_other_signals}
    with serving(folder / "model", tmp_path / "s.sqlite", **how) as server:
        server.process.send_signal(signal.SIGHUP)  # ignored at the start, as by nohup: does not stop it
        server.process.send_signal(signal.SIGINT)
        assert ask(server, "POST", "/embed", images[0])[0] == 401
        assert ask(server, "POST", "/embed", images[0], Authorization="Bearer wrong")[0] == 401
        assert ask(server, "GET", "/entries")[0] == 401
        assert ask(server, "GET", "/health")[0] == 200
        number = server.client("secret").enrol("a", images[0])
        head = (
            b"POST /entries?name=b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(images[1])
        )
        started = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(8)]
        for one in started:
            one.sendall(head)
            assert one.recv(100).startswith(b"HTTP/1.1 100")  # the server has the request
        server.process.send_signal(signal.SIGTERM)
        answers = []
        for one in started:
            one.sendall(images[1])
            answers.append(one.makefile("rb").read())
            one.close()
        assert all(answer.startswith(b"HTTP/1.1 201") for answer in answers)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        assert server.process.stdout.read() == "stopped\n"
    with contextlib.closing(Store(tmp_path / "s.sqlite")) as store:
        entries = store.entries(0, 100)
    assert [name for _, name, *_ in entries] == ["a"] + ["b"] * 8
    assert entries[0][0] == number


def is_listening(server):
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=60).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.slow
def test_every_acknowledged_enrolment_survives_sigkill(folder, images, tmp_path):
    acknowledged = {}
    enough = threading.Event()

    def enrol(name):
        number = client.enrol(name, images[int(name) % len(images)])
        acknowledged[number] = name
        if len(acknowledged) == 100:
            enough.set()

    with serving(folder / "model", tmp_path / "s.sqlite") as server:
        client = server.client()
        with ThreadPoolExecutor(8) as pool:
            tasks = [pool.submit(enrol, str(number)) for number in range(300)]
            assert enough.wait(300)
            server.process.kill()
        assert any(isinstance(task.exception(), DataError) for task in tasks)
    assert 100 <= len(acknowledged) < 300
    model = open_model(folder / "model")
    number = max(acknowledged)
    query = model.embed(model.preprocess(images[int(acknowledged[number]) % len(images)])[None])
    with contextlib.closing(Store(tmp_path / "s.sqlite")) as store:
        assert acknowledged.items() <= {entry: name for entry, name, *_ in store.entries(0, 300)}.items()
        [near] = store.search(query, 100)
    assert near[0].similarity == pytest.approx(1, abs=1e-5)


def test_the_threshold_of_an_fpir_follows_the_number_of_enrolled_images(folder, images, tmp_path):
    model = without(folder, tmp_path, "classes")
    capacity = open_model(model).capacity
    with (
        (tmp_path / "log").open("w") as log,
        serving(model, tmp_path / "s.sqlite", "--fpir", "0.3", stderr=log) as server,
    ):
        client = server.client()
        assert client.search(images[0])["strangers"] is None
        for count in (1, 2, 3):
            client.enrol(f"number {count}", images[count])
            found = client.search(images[0])
            assert (found["far"], found["fpir"]) == (None, 0.3)
            assert found["threshold"] == capacity.strictest(0.3, count)
            expected, text = capacity.expected(0.3, count)
            assert found["expected_fpir"] == {**json.loads(json.dumps(expected._asdict())), "text": text}
            similarity = found["results"][0]["similarity"]
            expected = capacity.fpir(similarity, count)
            assert found["strangers"] == {
                **json.loads(json.dumps(expected._asdict())),
                "enrolled": count,
                "text": expected.sentence(count),
            }
            assert found["known"] == (similarity >= found["threshold"])
        (far, threshold), *_ = open_model(model).thresholds.items()
        found = client.search(images[0], far=far)
        assert (found["far"], found["fpir"], found["threshold"]) == (far, None, threshold)
        about = client.about()
        assert (about["fpir"], about["holds"]) == (0.3, capacity.holds(0.3)._asdict())
        assert about["warning"] == capacity.warning(3, 0.3)
    assert (tmp_path / "log").read_text().count("images are enrolled") == 1


def test_a_gallery_store_or_option_that_does_not_fit_is_one_message(folder, tmp_path, capsys):
    model = folder / "model"
    write_gallery(tmp_path / "other", np.eye(8), model="another")
    write_gallery(tmp_path / "wide", np.eye(9), model=open_model(model).fingerprint)
    Store(tmp_path / "other.sqlite", "another", 8).write([New("a", np.eye(8, dtype=np.float32)[0], b"")])
    with socket.create_server(("127.0.0.1", 0)) as busy:
        for flags, noun in (
            (["--fpir", "0.1"], "class weights"),
            (["--gallery", tmp_path / "other"], "another network"),
            (["--gallery", tmp_path / "wide"], "9 values"),
            (["--store", tmp_path / "other.sqlite"], "other.sqlite"),
            (["--store", "host=db password=SECRET"], "postgresql"),
            (["--api_key_file", tmp_path / "none"], "api_key_file"),
            (["--far", 0.5], "0.5"),
            (["--port", port := busy.getsockname()[1]], f"{port}"),
            (["--batch_size", 0], "at least 1"),
        ):
            assert main(["serve", *map(str, [model, "--store", tmp_path / "s.sqlite", *flags])]) == 1
            [line] = capsys.readouterr().err.strip().splitlines()
            assert noun in line


def enrolled(client, image):
    return [one for one in client.search(image, k=20)["results"] if one["source"] == "enrolled"]


def test_two_servers_share_entries_and_outlive_a_crash_of_the_database(
    folder, images, database, postgres, tmp_path
):
    with contextlib.ExitStack() as stack, (tmp_path / "log").open("w+") as log:
        pair = [stack.enter_context(serving(folder / "model", database, stderr=log)) for _ in range(2)]
        first, second = (one.client() for one in pair)
        number = first.enrol("Ada", images[0])
        [found] = enrolled(second, images[0])
        assert (found["id"], found["name"]) == (number, "Ada")
        assert found["similarity"] == pytest.approx(1, abs=1e-5)
        last = second.enrol("Grace", images[1])
        postgres.kill()
        try:
            pool = stack.enter_context(ThreadPoolExecutor())
            lost = [
                pool.submit(call, images[1])
                for client in (first, second)
                for call in (client.search, lambda image, client=client: client.enrol("lost", image))
            ]
            assert all("503" in str(one.exception()) for one in lost)
            assert {type(one.exception()) for one in lost} == {DataError}
            assert first.encode(images[1]).shape == (8,)  # needs no database
        finally:
            postgres.start()
        again = second.enrol("Joan", images[1])
        names = {one["id"]: one["name"] for one in enrolled(first, images[1])}
        assert names == {number: "Ada", last: "Grace", again: "Joan"}
        second.delete(number)
        assert {one["id"] for one in enrolled(first, images[0])} == {last, again}
        for one in pair:
            one.process.terminate()
            one.process.wait(60)
        printed = "".join([one.process.stdout.read() for one in pair])
        log.seek(0)
        assert PASSWORD not in printed + log.read()
