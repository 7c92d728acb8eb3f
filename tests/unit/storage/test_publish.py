import contextlib
import multiprocessing
import time

import fsspec
import pytest

from plsc.errors import DataError
from plsc.storage.publish import FolderLock, lock_note, publishing, publishing_folder
from plsc.storage.urls import exists


@pytest.fixture(params=["local", "memory"])
def location(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "new/inner/file.bin")
    fsspec.filesystem("memory").makedirs("/publish", exist_ok=True)
    fsspec.filesystem("memory").rm("/publish", recursive=True)
    return "memory://publish/file.bin"


def names(location: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(location)
    folder = path.rsplit("/", 1)[0]
    return [name.rsplit("/", 1)[-1] for name in filesystem.find(folder)]


def test_a_file_appears_when_it_is_complete(location):
    with publishing(location) as file:
        file.write(b"content")
        assert not exists(location)
    assert names(location) == ["file.bin"]
    filesystem, path = fsspec.core.url_to_fs(location)
    assert filesystem.cat_file(path) == b"content"
    filesystem.rm(path)
    with contextlib.suppress(KeyboardInterrupt), publishing(location) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert names(location) == []


def test_what_another_process_has_published_meanwhile_is_not_replaced(location):
    def write() -> None:
        with publishing(location) as file:
            file.write(b"later")
            with fsspec.open(location, "wb") as other:
                other.write(b"first")

    with pytest.raises(DataError, match=r"another process|exists"):
        write()
    with fsspec.open(location, "rb") as file:
        assert file.read() == b"first"


@pytest.mark.parametrize("publish", [publishing, publishing_folder])
def test_concurrent_writers_are_excluded_and_leftovers_are_removed(tmp_path, publish):
    left = tmp_path / ".a.plsc-partial"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    (tmp_path / "precious").write_bytes(b"content")
    (left / "link").symlink_to(tmp_path / "precious")
    with publish(tmp_path / "a"):
        assert not (left / "half").exists()
        with (
            pytest.raises(DataError, match="another run is working on a"),
            publish(tmp_path / "a"),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "precious"]


def test_a_lock_outlives_a_reader_of_its_note_but_not_its_process(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with FolderLock(tmp_path):
        assert lock_note(tmp_path)["pid"]
        with pytest.raises(DataError, match="another run"):
            FolderLock(tmp_path)
        child.start()
    FolderLock(tmp_path).release()
    child.kill()
    child.join()
