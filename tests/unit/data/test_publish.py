from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from plsc.data.publish import publishing, publishing_folder
from plsc.errors import DataError
from plsc.storage.names import exists


def interrupted(location: str) -> None:
    with publishing(location) as file:
        file.write(b"half")
        assert not exists(location)
        raise KeyboardInterrupt


@pytest.fixture(params=["local", "memory"])
def location(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "file.bin")
    fsspec.filesystem("memory").makedirs("/publish", exist_ok=True)
    fsspec.filesystem("memory").rm("/publish", recursive=True)
    return "memory://publish/file.bin"


def names(location: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(location)
    folder = path.rsplit("/", 1)[0]
    return [name.rsplit("/", 1)[-1] for name in filesystem.find(folder)]


def test_a_file_appears_when_it_is_whole(location):
    with publishing(location) as file:
        file.write(b"content")
        assert not exists(location)
    assert names(location) == ["file.bin"]
    filesystem, path = fsspec.core.url_to_fs(location)
    assert filesystem.cat_file(path) == b"content"


def test_an_exception_leaves_nothing(location):
    with pytest.raises(KeyboardInterrupt):
        interrupted(location)
    assert names(location) == []


def test_an_existing_file_is_refused_and_stays(location):
    with publishing(location) as file:
        file.write(b"first")
    with pytest.raises(DataError, match="exists already"), publishing(location) as file:
        file.write(b"second")
    filesystem, path = fsspec.core.url_to_fs(location)
    assert filesystem.cat_file(path) == b"first"


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with publishing_folder(tmp_path / "set") as folder:
        (folder / "inner").mkdir()
        (folder / "inner/file").write_bytes(b"content")
        assert not (tmp_path / "set").exists()
    assert (tmp_path / "set/inner/file").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def publish_twice_at_once(path: Path, dead: Path) -> None:
    """The second one is faster, so that the first one finds the name taken."""
    with publishing_folder(path) as first:
        assert not dead.exists()
        (first / "file").write_bytes(b"first")
        with publishing_folder(path) as second:
            assert first.exists()
            (second / "file").write_bytes(b"second")


def test_leftovers_of_the_dead_are_removed_and_files_of_the_living_are_not(tmp_path):
    dead = [tmp_path / ".set.12-0123abcd.tmp", tmp_path / ".other.12-0123abcd.tmp"]
    for path in dead:
        path.mkdir()
        (path / "file").write_bytes(b"half")
    with pytest.raises(DataError, match=r"cannot write .*set"):
        publish_twice_at_once(tmp_path / "set", dead[0])
    assert (tmp_path / "set/file").read_bytes() == b"second"
    assert dead[1].exists()  # of another name: none of its business


def test_leftover_files_are_removed_and_links_are_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"content")
    (tmp_path / ".a.rec.12-0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".a.rec.13-0123abcd.tmp").symlink_to(tmp_path / "precious")
    with publishing(tmp_path / "a.rec") as first, publishing(tmp_path / "a.rec") as second:
        first.write(b"1")
        second.write(b"2")
    assert (tmp_path / "precious").exists()
    assert not (tmp_path / ".a.rec.12-0123abcd.tmp").exists()
    assert (tmp_path / "a.rec").read_bytes() == b"1"


def test_folders_that_are_missing_are_made_and_what_stands_in_their_way_is_told(tmp_path):
    with publishing(tmp_path / "new/inner/file") as file:
        file.write(b"1")
    assert (tmp_path / "new/inner/file").read_bytes() == b"1"
    with publishing_folder(tmp_path / "other/folder"):
        pass
    assert (tmp_path / "other/folder").is_dir()
    for publish in (publishing, publishing_folder):
        with (
            pytest.raises(DataError, match=r"cannot write .*Not a directory"),
            publish(tmp_path / "new/inner/file/below/a"),
        ):
            pass
