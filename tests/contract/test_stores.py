"""One suite for every store that checkpoints go to: local, a real S3 server, a real HDFS."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path

import fsspec
import pytest
import torch

from plsc.checkpoint import (
    Manifest,
    Retention,
    ShardedTensor,
    Snapshot,
    load_weights,
    save_checkpoint,
)
from plsc.checkpoint.manifest import HeadInfo, checkpoints_in, manifest_in, read_manifest
from plsc.checkpoint.remote import claim, clean, fetch, push, upload, verify
from plsc.checkpoint.save import prune
from plsc.errors import CheckpointError, DataError
from plsc.parallel.world import World
from plsc.storage.store import Store, staged
from plsc.storage.urls import folder_for, set_hdfs_user
from tests.roles import role_of_key
from tests.s3_server import s3_server, use_s3

WORLD = World.single()
BLOCK = 1 << 20

pytestmark = pytest.mark.slow


def save(folder: Path, name: str, step: int, rows: int = 5, **metrics: float) -> Path:
    tensors = {
        role_of_key("backbone.w"): torch.full((3,), float(step)),
        role_of_key("head.weight"): ShardedTensor(torch.full((rows, 4), float(step)), rows, 0),
    }
    manifest = Manifest(
        "0", step, 1, 0, 1, 4, {"": HeadInfo(rows, [(0, rows)])}, {}, {"metrics": metrics}, run_id="r"
    )
    return save_checkpoint(folder, name, Snapshot(tensors, manifest), WORLD)


def send(path: Path, store: Store, token="") -> None:
    manifest = read_manifest(path)
    upload(path, store, manifest, list(manifest.files), WORLD, token)


def test_files_and_folders_are_written_and_read_back(url, tmp_path):
    store = Store(url)
    local, back, told = tmp_path / "file", tmp_path / "back", []
    local.write_bytes(os.urandom(3 * BLOCK + 7))
    assert (store.names(), store.exists("a"), store.size("a/x")) == ([], False, None)
    assert store.read("a/m", 10) is None
    store.make_folder("a")
    store.put(local, "a/x", told.append)
    assert sum(told) == local.stat().st_size
    for text in (b"{}", b'{"a": 1}'):
        store.write("a/m", text)
        assert store.read("a/m", 10) == text
    with pytest.raises(DataError, match="expected at most 3"):
        store.read("a/m", 3)
    assert (store.names("a"), store.size("a/x")) == (["m", "x"], local.stat().st_size)
    if store.can_rename:
        store.rename("a", "b")
    else:
        store.put(local, "b/x")
        store.delete("a")
    assert store.names() == ["b"]
    store.get("b/x", back)
    assert back.read_bytes() == local.read_bytes()
    store.delete("b")
    store.delete("b")  # it does not exist: nothing happens
    for name in ("part1", "part[12]"):  # the second one is no pattern
        store.write(name, b"x")
    store.delete("part[12]")
    assert (store.exists("part1"), store.exists("part[12]")) == (True, False)
    store.delete("part1")
    assert store.names() == []


@pytest.mark.parametrize("kind", ["link", "other user"])
def test_a_download_does_not_use_a_folder_that_another_user_prepared(url, tmp_path, kind):
    send(save(tmp_path, "1", 1), Store(url))
    private, prepared = tmp_path / "private", tmp_path / "shared" / ".fetching-here"
    private.mkdir()
    (private / "precious.txt").touch()
    prepared.parent.mkdir()
    if kind == "link":
        prepared.symlink_to(private)
    else:
        prepared.mkdir()
        try:
            os.chown(prepared, 12345, 12345)
        except PermissionError:
            pytest.skip("only root can make a folder of another user")
    with pytest.raises(CheckpointError, match="another user"):
        fetch(f"{url}/1", WORLD, tmp_path / "shared" / "here")
    assert [path.name for path in private.iterdir()] == ["precious.txt"]
    assert not list(prepared.iterdir()) if kind == "other user" else prepared.is_symlink()


def test_a_checkpoint_is_uploaded_fetched_and_replaced_atomically(url, tmp_path):
    store = Store(url)
    send(save(tmp_path, "1", 1), store)
    send(save(tmp_path, "2", 2, loss=0.5), store)
    assert [name for name, _ in checkpoints_in(store)] == ["1", "2"]
    (folder_for("checkpoints", f"{url}/2").parent / ".fetching-2/0").mkdir(parents=True)  # of another process
    first = fetch(f"{url}/2", WORLD)
    assert first == folder_for("checkpoints", f"{url}/2")
    assert load_weights(first)["w"].tolist() == [2.0] * 3
    stamp = (first / "manifest.json").stat().st_ino
    assert (fetch(f"{url}/2", WORLD) / "manifest.json").stat().st_ino == stamp  # from the cache
    send(save(tmp_path, "2", 7, rows=9), store)  # another step, under the same name
    assert [manifest.step for _, manifest in checkpoints_in(store)] == [1, 7]
    assert verify(fetch(f"{url}/2", WORLD)).step == 7
    assert [name.count("step2") for name in store.names("2")] == [0, 0]  # no old file is left
    assert verify(f"{url}/1").step == 1
    prune(store, Retention(1), "r")
    assert store.names() == ["2"]


def test_of_two_runs_that_save_to_a_store_the_one_that_began_last_does(url, tmp_path):
    store = Store(url, total_seconds=3)
    first, second = save(tmp_path / "a", "1", 1), save(tmp_path / "b", "1", 2)
    tokens = claim(store), claim(store)
    send(second, store, token=tokens[1])
    with pytest.raises(CheckpointError, match="another run"):
        send(first, store, token=tokens[0])
    assert verify(f"{url}/1").step == 2

    class Cleaned(Store):
        def put(self, *arguments) -> None:
            super().put(*arguments)
            for name in [name for name in self.names() if "2" in name]:  # as another run at its start
                self.delete(name)

    with pytest.raises((CheckpointError, DataError)):
        send(save(tmp_path / "b", "2", 3), Cleaned(url), token=tokens[1])
    assert [name for name, _ in checkpoints_in(store)] == ["1"]


@pytest.mark.parametrize("late", ["put", "write"])
def test_of_two_runs_that_are_pushed_to_a_place_at_once_one_is_acknowledged_and_intact(url, tmp_path, late):
    store = Store(url)
    paths = {run: save(tmp_path / run, "1", 1) for run in "rs"}
    manifest = paths["s"] / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "run_id": "s"}))
    sent = []

    def try_to_send(run: str, to: Store) -> None:
        with contextlib.suppress(CheckpointError):
            send(paths[run], to)
            sent.append(run)

    def slow(*arguments) -> None:
        getattr(Store, late)(*arguments)
        if late == "put" or arguments[1].endswith("manifest.json"):
            try_to_send("s", store)

    try_to_send("r", type("Slow", (Store,), {late: slow})(url))
    assert sent == [verify(f"{url}/1").run_id]
    try_to_send("r" if sent == ["s"] else "s", store)
    assert store.names() == ["1"]
    assert sent == [verify(f"{url}/1").run_id]


def test_leftovers_of_a_killed_upload_are_not_a_checkpoint_and_are_removed(url, tmp_path):
    store = Store(url)
    path = save(tmp_path, "1", 1)
    name = f".saving-1-{'0' * 8}" if store.can_rename else "1"
    store.make_folder(name)
    for file in path.glob("*.safetensors"):
        store.put(file, f"{name}/{file.name}")
    assert checkpoints_in(store) == []
    clean(store)
    assert store.names() == []
    if store.can_rename:  # killed between the two renames
        send(path, store)
        store.rename("1", f".replaced-1-{'0' * 8}")
        clean(store)
        assert [name for name, _ in checkpoints_in(store)] == ["1"]


def test_an_incomplete_checkpoint_is_refused_and_nothing_is_replaced(url, tmp_path):
    store = Store(url)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        fetch(f"{url}/1", WORLD)
    send(save(tmp_path, "1", 1), store)
    good = fetch(f"{url}/1", WORLD, tmp_path / "here")
    data = next(name for name in store.names("1") if name.endswith(".safetensors"))
    content = bytearray((good / data).read_bytes())
    content[-1] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    text = manifest_in(store, "1").to_json().encode()
    store.write("1/manifest.json", text.replace(b'"step": 1', b'"step": 2'))  # differs from the local one
    store.put(tmp_path / "flipped", f"1/{data}")
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        fetch(f"{url}/1", WORLD, tmp_path / "here")
    (tmp_path / "short").write_bytes(content[:-3])
    store.put(tmp_path / "short", f"1/{data}")
    with pytest.raises(CheckpointError, match="is damaged"):
        fetch(f"{url}/1", WORLD, tmp_path / "here")
    store.delete(f"1/{data}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        fetch(f"{url}/1", WORLD, tmp_path / "here")
    manifest = json.loads(text)
    manifest["files"] = {"../../out": manifest["files"][data]}
    store.write("1/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="plain file name"):
        fetch(f"{url}/1", WORLD, tmp_path / "here")
    assert verify(tmp_path / "here").step == 1
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    send(save(tmp_path, "3", 3), store)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        fetch(f"{url}/3", WORLD, tmp_path / "photos")


def test_push_uploads_missing_checkpoints_and_completes_partial_ones(url, tmp_path):
    store = Store(url)
    send(save(tmp_path / "run", "1", 1), store)
    save(tmp_path / "run", "2", 2)
    save(tmp_path / "run", "3", 3)
    assert push(str(tmp_path / "run"), url) == ["2", "3"]
    assert push(str(tmp_path / "run"), url) == []
    assert push(str(tmp_path / "run" / "1"), url) == ["1"]
    save(tmp_path / "other", "2", 5)
    with pytest.raises(CheckpointError, match="others of the names"):
        push(str(tmp_path / "other"), url)
    assert [manifest.step for _, manifest in checkpoints_in(store)] == [1, 2, 3]


def test_hdfs_killed_in_an_upload_and_in_a_download_loses_nothing(hdfs, tmp_path):
    send(save(tmp_path, "1", 1), Store(f"{hdfs.url}/killed"))
    store = Store(f"{hdfs.url}/killed", total_seconds=2, silence=2)  # of a server that is dead anyhow
    big = save(tmp_path, "2", 2, rows=2_000_000)  # 32 MB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plsc.machine.Counter.add", lambda *_: hdfs.kill())  # at first; a dead node stays dead
        with pytest.raises(CheckpointError, match="hdfs://") as failure:
            send(big, store)
    assert "can be uploaded when the store is available again" in str(failure.value)
    hdfs.revive()
    store = Store(f"{hdfs.url}/killed", total_seconds=60)
    assert [name for name, _ in checkpoints_in(store)] == ["1"]
    clean(store)
    assert push(str(tmp_path), f"{hdfs.url}/killed") == ["2"]

    failed = threading.Event()

    def kill(count: int) -> None:
        if not failed.is_set():
            failed.set()
            hdfs.kill("datanode")

    impatient = Store(f"{hdfs.url}/killed", total_seconds=2, silence=2)
    name = next(name for name in store.names("2") if name.endswith(".safetensors"))
    with contextlib.suppress(DataError):  # data in transit may have arrived
        impatient.get(f"2/{name}", tmp_path / "part", kill)
        impatient.get(f"2/{name}", tmp_path / "part")
    assert failed.is_set()
    hdfs.revive()
    assert verify(fetch(f"{hdfs.url}/killed/2", WORLD)).step == 2


def test_an_s3_server_killed_in_an_upload_gives_a_one_line_error_and_keeps_the_local_copy(tmp_path):
    with pytest.MonkeyPatch.context() as patch, s3_server() as address:
        use_s3(patch, address)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
        fsspec.filesystem("s3").mkdir("bucket")
        store = Store("s3://bucket/run", total_seconds=2)
        path = save(tmp_path, "1", 1)
        _check_keys_from_now_on(address)
        with pytest.raises(CheckpointError) as refused:
            send(path, store)
        assert "a-secret-key" not in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="intact on the local disk"):
        send(path, store)
    assert time.monotonic() - began < 60  # bounded; not a performance test
    assert verify(path).step == 1
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_process_that_uses_hdfs_can_fork_as_data_workers_do(hdfs):
    Store(f"{hdfs.url}/forked").make_folder("a")
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20)
    is_stuck = child.is_alive()
    child.kill()
    assert not is_stuck


def test_hdfs_refuses_another_user_with_a_one_line_error(hdfs, tmp_path, monkeypatch):
    Store(hdfs.url).make_folder("private")
    monkeypatch.setenv("HADOOP_USER_NAME", os.environ.get("HADOOP_USER_NAME", ""))
    try:
        set_hdfs_user("mallory")
        with pytest.raises(CheckpointError, match=r"AccessControl|ermission") as refused:
            send(save(tmp_path, "1", 1), Store(f"{hdfs.url}/private", total_seconds=3))
        assert len(str(refused.value).splitlines()) == 1
    finally:
        monkeypatch.delenv("HADOOP_USER_NAME", raising=False)


def test_a_server_that_never_answers_is_abandoned(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in ("AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(DataError, match="no answer for 1 s"):
            Store("s3://bucket/run", total_seconds=0.5, silence=1).names()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_file_is_not_moved_into_a_folder_to_which_a_link_of_its_name_leads(tmp_path):
    outside, store = tmp_path / "outside", Store(tmp_path / "run")
    outside.mkdir()
    store.make_folder()
    (tmp_path / "run/best.json").symlink_to(outside)
    store.write("best.json", b"{}")
    assert (tmp_path / "run/best.json").read_bytes() == b"{}"
    assert not list(outside.iterdir())


def test_a_folder_is_not_moved_into_one_that_another_process_has_published(tmp_path):
    place = str(tmp_path / "out")

    def publish_late() -> None:
        with staged(place, Store, ["late"]) as late:
            Path(late, "late").touch()
            with staged(place, Store, ["early"]) as early:
                Path(early, "early").touch()
                Path(early, ".saving-early-0123abcd").touch()  # of an attempt that was killed

    with pytest.raises(DataError, match="out"):
        publish_late()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["early"]


def test_one_process_at_a_time_writes_to_an_object_store_and_deletes_only_its_own_files():
    place = "memory://bucket/written-by-two"
    Store(place).write("part_1/images/0.jpg", b"mine")
    for _ in range(2):
        with pytest.raises(DataError, match="exists"), staged(place, Store, ["part_1.txt"]):
            pass
    assert Store(place).names() == ["part_1"]
    Store(place).delete("part_1")

    def fail_late() -> None:
        with staged(place, Store, ["part_0.txt", "manifest.json"]):
            Store(place).write("part_0.txt", b"line")
            Store(place).write("notes.txt", b"of another program")
            with pytest.raises(DataError, match="exists"), staged(place, Store, ["part_0.txt"]):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_late()
    assert Store(place).names() == ["notes.txt"]
    Store(place).delete("notes.txt")
    with pytest.raises(DataError, match=r"part_0\.txt"), staged(place, Store, ["part_0.txt"]):
        pass  # another process has removed it


def _check_keys_from_now_on(address: str) -> None:
    plain = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{address}/moto-api/reset-auth", b"0", plain)
    urllib.request.urlopen(request).close()


def test_a_silently_failed_rename_is_detected(tmp_path, monkeypatch):
    store = Store(f"file://{tmp_path}/x")
    store.make_folder("a")
    monkeypatch.setattr(os, "replace", lambda *_: None)
    with pytest.raises(DataError, match="was not renamed"):
        store.rename("a", "b")
