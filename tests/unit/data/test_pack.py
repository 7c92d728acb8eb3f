import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from plsc.data.pack import CHECKSUM, pack, unpack
from plsc.errors import DataError


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "set"
    (root / "images/été").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "label.txt").write_text("images/été/a.jpg 1\n")
    (root / "images/été/a.jpg").write_bytes(np.random.default_rng(0).bytes(3_000_000))
    (root / "images/none.jpg").write_bytes(b"")
    (root / ("n" * 200)).write_bytes(b"a long name")
    (root / "odd\nname").write_bytes(b"a name of two lines")
    return root


def content(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def write_archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, data in members:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(buffer.getvalue())
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = "/etc/passwd"
    return entry


def test_an_unpacked_folder_equals_the_packed_one(folder, tmp_path):
    packed = pack(folder, str(tmp_path / "out.tar.zst"))
    pack(folder, str(tmp_path / "again.tar.zst"))
    assert (tmp_path / "out.tar.zst").read_bytes() == (tmp_path / "again.tar.zst").read_bytes()
    assert packed == unpack(str(tmp_path / "out.tar.zst"), tmp_path / "back")
    assert packed.files == 5
    assert content(tmp_path / "back") == content(folder)
    with pytest.raises(DataError, match="already exists"):
        unpack(str(tmp_path / "out.tar.zst"), folder)


def test_tar_can_read_an_archive(folder, tmp_path):
    if not shutil.which("tar"):
        pytest.skip("tar is not installed")
    pack(folder, str(tmp_path / "out.tar.zst"))
    with pa.CompressedInputStream(str(tmp_path / "out.tar.zst"), "zstd") as stream:
        (tmp_path / "out.tar").write_bytes(stream.read())
    (tmp_path / "back").mkdir()
    subprocess.run(["tar", "-xf", "../out.tar"], cwd=tmp_path / "back", check=True)
    (tmp_path / "back" / CHECKSUM).unlink()
    assert content(tmp_path / "back") == content(folder)


def test_archives_are_written_to_and_read_from_remote_stores(folder, tmp_path, s3):
    url = f"{s3}/a.tar.zst"
    pack(folder, url)
    unpack(url, tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)
    with pytest.raises(DataError, match="already exists"):
        pack(folder, url)
    names = fsspec.filesystem("s3").ls(s3, detail=False)
    assert [name.rsplit("/", 1)[-1] for name in names] == ["a.tar.zst"]


def test_a_file_that_changes_while_it_is_packed_is_named(folder, tmp_path, monkeypatch):
    add = tarfile.TarFile.addfile

    def grow(*given):
        add(*given)
        with (folder / "images/été/a.jpg").open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(tarfile.TarFile, "addfile", grow)
    with pytest.raises(DataError, match=r"a\.jpg has changed"):
        pack(folder, str(tmp_path / "out.tar.zst"))


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/etc"), os.mkfifo])
def test_links_and_pipes_are_not_packed(folder, tmp_path, make):
    make(folder / "images" / "odd")
    with pytest.raises(DataError, match="odd"):
        pack(folder, str(tmp_path / "out.tar.zst"))
    assert not list(tmp_path.glob("*out.tar*"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (member("a/../../climbs"), "climbs"),
        (member("/absolute"), "absolute"),
        (member("soft", tarfile.SYMTYPE), "soft"),
        (member("hard", tarfile.LNKTYPE), "hard"),
        (member("device", tarfile.CHRTYPE), "device"),
        (member("twice"), "cannot write"),
        (member("twice/below"), "cannot write"),
    ],
)
def test_members_that_lead_out_of_the_folder_are_refused_and_nothing_is_left(tmp_path, entry, message):
    path = write_archive(tmp_path / "a.tar.zst", [(member("twice"), b"1"), (entry, b"")])
    with pytest.raises(DataError, match=message):
        unpack(str(path), tmp_path / "back")
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar.zst"]


def test_folders_are_packed_and_unpacked_up_to_a_depth(tmp_path):
    """Beyond, Python's recursion limit ends both with a traceback."""
    archive, deep = tmp_path / "a.tar.zst", tmp_path / "deep" / "/".join(["a"] * 199)
    deep.mkdir(parents=True)
    (deep / "x").touch()
    pack(tmp_path / "deep", str(archive))
    unpack(str(archive), tmp_path / "out", 10**7)
    assert content(tmp_path / "out") == content(tmp_path / "deep")
    (deep / "b").mkdir()
    (deep / "b" / "x").touch()
    with pytest.raises(DataError, match="nested"):
        pack(tmp_path / "deep", str(tmp_path / "b.tar.zst"))
    write_archive(archive, [(member("a/" * 1900 + "x"), b"")])
    with pytest.raises(DataError, match="too deep"):
        unpack(str(archive), tmp_path / "again", 10**7)


@pytest.mark.parametrize("sums", [None, b"", b"0" * 64])
def test_a_wrong_or_missing_checksum_is_detected(tmp_path, sums):
    members = [(member("file"), b"content"), *([] if sums is None else [(member(CHECKSUM), sums)])]
    with pytest.raises(DataError, match="checksum"):
        unpack(str(write_archive(tmp_path / "a.tar.zst", members)), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_member_that_is_too_large_is_refused_before_it_is_written(tmp_path):
    header = member("huge")
    header.size = 2**60
    with pa.CompressedOutputStream(str(tmp_path / "a.tar.zst"), "zstd") as stream:
        stream.write(header.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match="--max_bytes"):
        unpack(str(tmp_path / "a.tar.zst"), tmp_path / "back")


def test_an_archive_of_over_100_times_its_size_needs_permission(tmp_path):
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros/file").write_bytes(b"")
    os.truncate(tmp_path / "zeros/file", 10**7)
    archive = str(tmp_path / "a.tar.zst")
    pack(tmp_path / "zeros", archive)
    for most in (None, 10**7 - 1):
        with pytest.raises(DataError, match="--max_bytes"):
            unpack(archive, tmp_path / "back", most)
        assert not (tmp_path / "back").exists()
    assert unpack(archive, tmp_path / "back", 10**7).content_bytes == 10**7


def test_an_archive_is_bounded_in_headers(tmp_path):
    flood = [(member("x/" * (n % 9) + "x", tarfile.DIRTYPE), b"") for n in range(20_000)]
    with pytest.raises(DataError, match="--max_bytes"):
        unpack(str(write_archive(tmp_path / "a.tar.zst", flood)), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_damaged_archive_never_gives_a_different_folder(folder, tmp_path):
    (folder / "images/été/a.jpg").write_bytes(b"short " * 200)
    good_path = tmp_path / "good.tar.zst"
    pack(folder, str(good_path))
    good, expected = good_path.read_bytes(), content(folder)
    path = tmp_path / "bad.tar.zst"
    refused = 0
    for turn in range(0, 8 * len(good), 47):  # bits of every position, and some truncations
        bad = bytearray(good)
        bad[turn // 8] ^= 1 << turn % 8
        if turn % 99 == 0:
            bad = bad[: turn // 8]
        path.write_bytes(bad)
        try:
            unpack(str(path), tmp_path / "back")
        except DataError:
            refused += 1
            assert not (tmp_path / "back").exists()
        else:  # an unused bit, in the zstd frame or a file's time
            assert content(tmp_path / "back") == expected
            shutil.rmtree(tmp_path / "back")
    assert refused > 4 * len(good) / 47
    assert {p.name for p in tmp_path.iterdir()} == {"set", "good.tar.zst", "bad.tar.zst"}


def test_a_renamed_folder_is_refused(folder, tmp_path):
    path = tmp_path / "bad.tar.zst"
    pack(folder, str(path))
    with pa.CompressedInputStream(str(path), "zstd") as stream:
        data = stream.read()
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data.replace(b"empty", b"emtpy"))  # with the same sum of bytes, which tar checks
    with pytest.raises(DataError, match="is damaged"):
        unpack(str(path), tmp_path / "back")
