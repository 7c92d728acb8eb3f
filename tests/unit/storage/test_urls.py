"""Which locations that come out of data may be opened."""

import contextlib
import gzip
import os
import pickle
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from plsc.cli import main
from plsc.data.files import listed_path, read_file_list, shard_files
from plsc.data.sources import open_images, open_source
from plsc.data.sources.base import read_image
from plsc.errors import DataError
from plsc.storage.blocks import RemoteBytes, fingerprint_of
from plsc.storage.store import Store
from plsc.storage.urls import exists, located, reason_of

PNG = b"\x89PNG and the rest"


@contextlib.contextmanager
def serving(handler):
    """The URL of a server."""
    handler.do_HEAD, handler.log_message = handler.do_GET, lambda *_: None
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_listing_over_http_is_searched_in_linear_time():
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            links = b"<a class='x' href='./7:a/'>7</a> <A HREF=\"a@best.json\">best</A>"
            for other in (b"../x", b"%2e%2e/", b"a%2F..%2F..%2Fx", b"b?x", b"/x", b"c/d", b"..%5Cx"):
                links += b"<a href='%b'></a>" % other
            links = b"<html>" + links if self.path == "/cut" else links
            self.wfile.write(links + b"<a" + b" " * 5000)  # fsspec takes the cube of the blanks

    with serving(Page) as url:
        assert Store(f"{url}/run").names() == ["7:a", "a@best.json"]
        with pytest.raises(DataError, match="cut off"):
            Store(f"{url}/cut", total_seconds=0.1).names()


def test_a_match_keeps_the_beginning_of_its_pattern(monkeypatch):
    """Of abfs://container@account/x, the client knows only the container afterwards."""
    fsspec.filesystem("memory").pipe({"/account/a/1.rec": b"", "/account/b/2.rec": b""})
    monkeypatch.setattr(MemoryFileSystem, "unstrip_protocol", lambda *_: "memory://other/1.rec")
    for pattern in ("memory://account/?/*.rec", "memory://acc*/?/*.rec"):
        assert shard_files(pattern, ".rec") == [f"memory://account/{n}.rec" for n in ("a/1", "b/2")]


def test_class_folders_over_http_are_those_of_the_disk_and_none_is_left_out(tmp_path):
    names = ("A", "with blank", "b&c", "Jos\u00e9", "-dash", "a:b", "a\\b", "a@b")
    for name in names:
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "1.png").write_bytes(PNG + name.encode())

    class Folder(SimpleHTTPRequestHandler):
        missing = None

        def __init__(self, *arguments):
            super().__init__(*arguments, directory=tmp_path)

        def do_GET(self):
            if self.path.rstrip("/") == self.missing:
                self.send_error(404)
            else:
                super().do_GET()

    local = open_source(str(tmp_path / "set"))
    with serving(Folder) as url:
        remote = open_source(f"{url}/set")
        assert remote.class_names == local.class_names
        assert {remote[i] for i in range(5)} == {local[i] for i in range(5)}
        assert fingerprint_of(f"{url}/set/A/1.png").version  # its Last-Modified: it has no ETag
        assert shard_files(f"{url}/none.tar", ".tar") == [f"{url}/none.tar"]  # without reading it
        Folder.missing = "/set/A"
        for location in (f"{url}/set", f"{url}/set/*/*.tar"):
            fsspec.filesystem("http").invalidate_cache()
            with pytest.raises(DataError, match="cannot be listed"):
                open_source(location)


def test_a_file_is_not_missing_when_its_server_fails(monkeypatch):
    class Failing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.status)
            self.end_headers()

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(Failing) as url:
        for status in (503, 429):
            Failing.status = status
            with pytest.raises(DataError, match=str(status)):
                exists(f"{url}/train.idx")
        Failing.status = 404
        assert not exists(f"{url}/train.idx")


def test_a_set_is_opened_again_as_it_is_now(s3):
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdirs("again", exist_ok=True)
    filesystem.pipe("again/a.tar", b"1")
    assert shard_files("s3://again", ".tar") == ["s3://again/a.tar"]
    boto = fsspec.filesystem("s3", skip_instance_cache=True)  # another process
    boto.pipe("again/b.tar", b"22")
    boto.pipe("again/a.tar", b"22")
    assert shard_files("s3://again", ".tar") == ["s3://again/a.tar", "s3://again/b.tar"]
    assert fingerprint_of("s3://again/a.tar").size == 2


@pytest.fixture
def requests():
    """The paths that are requested from the server whose address is the first entry."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found.append(self.path)
            self.send_response(404)
            self.end_headers()

    with serving(Handler) as url:
        found = [url]
        yield found


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("x/../a b::c.jpg", "/set", "a b::c.jpg"),
        ("file:///a.jpg", "/set", "/a.jpg"),
        ("s3://bucket/x/a b.jpg", "s3://bucket/set", "s3://bucket/x/a b.jpg"),
        ("https://host/faces/a.jpg?size=9", "s3://bucket/set", "https://host/faces/a.jpg?size=9"),
        ("/data/a.jpg", "s3://bucket/set", "/data/a.jpg"),
    ],
)
def test_a_location_of_the_own_store_or_an_allowed_one_is_followed(name, folder, expected):
    allowed = ("s3://more/", "https://host/faces", "file:///data/")
    assert located(name, folder, allowed) == located(name, folder, ",".join(allowed)) == expected


@pytest.mark.parametrize("name", [
    "", ".", "..", "../a", "a/../../b", "a\0b", "http://host/a", "s3://bucket/a", "s3://more", "s3://more-evil/a",
    "s3://more/../a", "s3://more/%2e%2E/a", "s3://more/..\\a", "s3://more/.\t./a", "s3://more/a::http://host/b",
    "reference://k::http://host/refs.json", "zip://a::file:///etc/x.zip", "https://host/faces@evil/a",
    "https://host@evil/faces/a", "memory://a", "local://a", "file://host/a",
])  # fmt: skip
def test_another_location_in_a_local_list_is_refused(name):
    with pytest.raises(DataError, match="location"):
        located(name, "/set", ("s3://more", "https://host/faces/"))


@pytest.mark.parametrize("name", [
    "/etc/passwd", "//etc/passwd", "file:///etc/passwd", "../a", "s3://bucket-2/a", "s3a://bucket/a", "S3://bucket/a",
    "a::http://host/refs.json", "..%2fa", "s3://bucket/a::file:///etc/passwd", "http://host/a", "s3://key@bucket/a",
])  # fmt: skip
def test_another_location_in_a_remote_list_is_refused(name):
    with pytest.raises(DataError, match="allowed"):
        located(name, "s3://bucket/set", "")


def test_a_list_elsewhere_names_no_local_file_no_other_server_and_no_folder_above():
    with pytest.raises(DataError, match="location"):
        located("/etc/passwd", "/set", (), "https://host/list.csv")  # with a local image_folder
    for place in ("hdfs:///set", "hdfs:"):  # the folder of hdfs:///list.csv is hdfs:
        assert located("hdfs:///set/a", place, (), "hdfs:///set/list.csv") == "hdfs:///set/a"
        with pytest.raises(DataError, match="allowed"):
            located("hdfs://evil:8020/a", place, (), "hdfs:///set/list.csv")
    with pytest.raises(DataError, match="location"):  # a server leaves out the tab
        listed_path(b".\t./private/a.jpg", "http://host/faces", (), "/pairs.csv")
    with pytest.raises(DataError, match="location"):
        listed_path(b".\n./private/a.jpg", "http://host/faces", (), "/rows.json")
    assert listed_path(b"a\tb.jpg", "/faces", (), "/pairs.csv") == b"a\tb.jpg"


def dataset(kind: str, folder: Path, location: str) -> Path:
    """Write a dataset whose list has a location; return its path."""
    folder.mkdir()
    if kind == "label.txt":
        (folder / kind).write_text(f"{location} 0\n")
    elif kind == "file_list.txt":
        (folder / kind).write_text(f"{location}\n")
    elif kind == "csv":
        (folder / "a.csv").write_text(f"path,label\n{location},0\n")
    else:
        (folder / "a.jsonl").write_text(f'{{"path": "{location}", "label": 0}}\n')
    return folder


KINDS = ("label.txt", "file_list.txt", "csv", "jsonl")
COMMANDS = {
    "train": lambda place: ["train", "--data.dataset_dir", place],
    "partition": lambda place: ["data", "partition", "--nranks", "2", "--data_dir", place],
    "convert": lambda place: ["data", "convert", place, f"{place}.rec"],
    "inspect": lambda place: ["data", "inspect", place],
}


@pytest.mark.parametrize(("kind", "command"), list(zip(KINDS, COMMANDS, strict=True)))
def test_no_command_calls_a_server_or_reads_a_pipe_that_a_list_names(
    kind, command, tmp_path, requests, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    server = requests[0]
    bad = (f"reference://k::{server}/refs.json", f"{server}/a.jpg", f"simplecache::{server}/a")
    for number, location in enumerate((*bad, f"{tmp_path}/pipe", f"file://{tmp_path}/pipe", "../pipe")):
        place = dataset(kind, tmp_path / f"set{number}", location)
        if number in (0, 3):
            code = main(COMMANDS[command](str(place)))
            assert code == 1 or re.search("broken +1 of 1", capsys.readouterr().out)
        with pytest.raises(DataError):
            open_source(place)[0]
    assert requests[1:] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_list_may_name_absolute_paths_and_with_allowed_urls(kind, tmp_path, s3):
    content = b"QUJD\t0\n" if kind == "file_list.txt" else PNG
    (tmp_path / "a").write_bytes(content)
    fsspec.filesystem("s3").pipe(f"{s3}/x/a", content)
    expected = b"ABC" if kind == "file_list.txt" else PNG
    assert open_source(dataset(kind, tmp_path / "near", str(tmp_path / "a")))[0] == (expected, 0)
    far = dataset(kind, tmp_path / "far", f"{s3}/x/a")
    with pytest.raises(DataError, match="allowed"):
        open_source(far)[0]
    source = pickle.loads(pickle.dumps(open_source(far, allowed=(f"{s3}/x/",))))
    assert source[0] == (expected, 0)
    if kind == "file_list.txt":
        partition = ["data", "partition", "--nranks", "1", "--data_dir", str(far), "--allowed", f"{s3}/"]
        assert main(partition) == main([*partition, "--verify"]) == 0


def test_a_remote_list_may_name_its_own_bucket_and_a_local_one_absolute_paths_and_allowed_urls(tmp_path, s3):
    store = fsspec.filesystem("s3")
    store.pipe({f"{s3}/a": PNG, f"{s3}/y/list.csv": f"path,label\n{s3}/a,3\n".encode()})
    assert open_source(f"{s3}/y/list.csv")[0] == (PNG, 3)
    store.pipe(f"{s3}/y/other.csv", b"path,label\n/etc/passwd,0")
    with pytest.raises(DataError, match="allowed"):
        open_source(f"{s3}/y/other.csv")
    (tmp_path / "b").write_bytes(PNG)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/b\n{s3}/a\n")
    with pytest.raises(DataError, match=r"list\.txt:2: .*allowed"):
        open_images(tmp_path / "list.txt")
    images = open_images(tmp_path / "list.txt", [s3])
    assert images[0] == images[1] == (PNG, -1)
    assert images.path(1) == f"{s3}/a"


def test_a_file_url_is_a_local_folder_whose_pipes_and_links_are_refused(tmp_path):
    os.mkfifo(dataset("label.txt", tmp_path / "set", "pipe") / "pipe")
    with pytest.raises(DataError, match="regular"):
        open_source(f"file://{tmp_path}/set")[0]


def test_the_keys_of_a_bucket_name_no_server_and_no_local_file(requests, tmp_path, s3):
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    server = requests[0]
    named = ("one/a.jpg", f"one/x::reference://k::{server}/a.jpg")  # a name is not a chain
    for key in (*named, f"{server}/a.jpg", f"reference://k::{server}/refs.json/a.jpg", f"{tmp_path}/a.jpg"):
        fsspec.filesystem("s3").call_s3("put_object", Bucket=s3[5:], Key=f"set/{key}", Body=b"\xff\xd8\xff")
    source = open_images(f"{s3}/set")
    assert [source[number][0] for number in range(len(source))] == [b"\xff\xd8\xff"] * 2
    assert [path.startswith("one/") for path in source.paths()] == [True] * 2
    assert requests[1:] == []


@pytest.mark.parametrize("text", ["P4ssw0rd", "BM secret of some length"])
def test_a_list_does_not_publish_a_file_that_is_no_image(tmp_path, text):
    (tmp_path / "key").write_text(text)
    place = dataset("label.txt", tmp_path / "set", str(tmp_path / "key"))
    assert main(["data", "convert", str(place), str(tmp_path / "copy.rec")]) == 1
    assert not (tmp_path / "copy.rec").exists()


def test_a_server_cannot_fill_the_memory_with_a_compressed_or_long_answer():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            is_long = self.path == "/long.jpg"
            self.send_response(206 if is_long else 200)
            self.send_header("Content-Length", str(2**28) if is_long else str(len(packed)))
            if not is_long:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for part in [bytes(2**20)] * 2**8 if is_long else [packed]:
                    if self.command == "GET":
                        self.wfile.write(part)

    packed = gzip.compress(bytes(10**6))
    with serving(Handler) as url:
        assert read_image(f"{url}/packed.jpg") == packed
        with pytest.raises(DataError, match="bytes"):
            read_image(f"{url}/long.jpg")
        with pytest.raises(DataError, match="sent"):
            RemoteBytes(f"{url}/long.jpg").read_at(2**22, 1)


# Errors about stores that cannot be reached, with real clients and no server.


@pytest.fixture
def nobody() -> str:
    """Yield a local address where no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"  # bound, and not listening


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.filterwarnings("ignore")  # warnings of the client
def test_an_unreachable_hdfs_is_reported_with_duration(nobody):
    url = f"hdfs://{nobody}/run"
    with pytest.raises(DataError) as refused:
        Store(url, total_seconds=0).names()
    message = str(refused.value)
    assert message.startswith(f"{url}: ")
    assert "refused" in message


@pytest.mark.parametrize("ask", [lambda url: Store(url).names(), exists, read_file_list])
def test_missing_s3_credentials_are_reported_and_not_retried(no_credentials, monkeypatch, ask):
    monkeypatch.setattr("plsc.storage.urls.time.sleep", lambda seconds: pytest.fail("asked again"))
    with pytest.raises(DataError, match="Credentials"):
        ask("s3://bucket/run")


def test_an_hdfs_error_is_reported_without_the_java_stack_trace() -> None:
    client = (
        'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=a'
        "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSPermissionChecker.check(FS.java:400)"
    )
    reason = reason_of(RuntimeError(client))
    assert reason.endswith("Permission denied: user=a")
    assert "FSPermissionChecker" not in reason
    assert "FSPermissionChecker" not in reason_of(RuntimeError(client.encode().decode("unicode_escape")))
