import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from plsc.data.sources import open_source
from plsc.data.sources.tar import TarSource
from plsc.errors import DataError
from tests.images import write_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = "a.jpg"
    return entry


def write(path: Path, *members: tuple[str | tarfile.TarInfo, bytes], form: str = "pax") -> Path:
    with tarfile.open(path, "w", format=FORMATS[form]) as archive:
        for entry, data in members:
            entry = member(entry) if isinstance(entry, str) else entry
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def read(location: Path | str, **options: str) -> list[tuple[bytes, int]]:
    source = TarSource(location, **options)
    assert source.labels().tolist() == [source[i][1] for i in range(len(source))]
    return [source[i] for i in range(len(source))]


PLAIN = [
    ("x/a.jpg", b"image a"),
    ("x/a.cls", b"3"),
    ("x/b.cls", b"0\n"),
    ("x/b.PNG", b"image b" * 999),
]
EXPECTED = [(b"image a", 3), (b"image b" * 999, 0)]


def test_members_that_hold_no_label_are_not_kept_in_memory(tmp_path):
    texts = [(f"a.text{number}", bytes(2**20)) for number in range(64)]
    path = write(tmp_path / "train.tar", *texts, ("a.jpg", b"image"), ("a.cls", b"1"))
    tracemalloc.start()
    assert TarSource(path)[0] == (b"image", 1)
    assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("form", FORMATS)
def test_every_tar_format_gives_the_same_samples(tmp_path, form):
    assert read(write(tmp_path / "a.tar", *PLAIN, form=form)) == EXPECTED


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_long_and_non_ascii_names_are_read(tmp_path, form):
    key = "folder/" * 30 + "été" * 40
    path = write(tmp_path / "a.tar", (f"{key}.jpg", b"image"), (f"{key}.cls", b"1"), form=form)
    source = TarSource(path)
    assert source[0] == (b"image", 1)
    assert source.name(0) == f"a.tar:{key}"


def test_a_size_in_gnu_binary_form_is_read(tmp_path):
    path = write(tmp_path / "a.tar", *PLAIN, form="gnu")
    data = bytearray(path.read_bytes())
    data[124:136] = b"\x80" + (7).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    assert read(path) == EXPECTED


def test_folders_hidden_members_and_members_without_suffix_are_ignored(tmp_path, messages):
    hidden = ("x/.hidden.jpg", "__MACOSX/x/._a.jpg", "x/@eaDir/a.jpg/SYNO_THUMB.jpg", "x/Thumbs.db")
    members = [(member("x/", tarfile.DIRTYPE), b""), ("README", b"text"), *((name, b"1") for name in hidden)]
    assert read(write(tmp_path / "a.tar", *members, *PLAIN)) == EXPECTED
    assert len(messages) == 1
    assert all(noun in messages[0] for noun in ("4 hidden", "1 without", "README"))


def test_shards_of_operating_systems_are_not_read(tmp_path):
    for folder in (tmp_path, tmp_path / ".mine", tmp_path / "@eaDir"):
        folder.mkdir(exist_ok=True)
        write(folder / "a.tar", *PLAIN)
        (folder / "._a.tar").write_bytes(b"x")
    for location in (tmp_path, tmp_path / "*.tar", tmp_path / ".mine", tmp_path / ".mine" / "?.tar"):
        assert read(location) == EXPECTED
    with pytest.raises(DataError, match="no file"):
        read(tmp_path / "*" / "*.tar")


@pytest.mark.parametrize(
    ("label", "options", "expected"),
    [
        (("a.cls", b"7"), {}, 7),
        (("a.cls", b"\xef\xbb\xbf7\r\n"), {}, 7),
        (("a.json", b'{"label": 7, "who": "bo"}'), {}, 7),
        (("a.json", b'{"label": 7, "who": 2}'), {"label_column": "who"}, 2),
        (("a.json", b'{"label": 7, "who": "bo"}'), {"label_column": "who"}, 0),
        (("a.identity.txt", b"12"), {"label_column": "identity.txt"}, 12),
    ],
)
def test_the_label_is_found_by_suffix_or_in_the_json(tmp_path, label, options, expected):
    path = write(tmp_path / "a.tar", ("a.jpg", b"image"), label)
    assert read(path, **options) == [(b"image", expected)]


def test_one_of_several_images_is_chosen_by_its_suffix(tmp_path):
    """The name of a sample ends at the first dot of the last part."""
    images = [("v1.0/a.mask.png", b"mask"), ("v1.0/a.b.png", b"input"), ("v1.0/a.b.cls", b"5")]
    path = write(tmp_path / "a.tar", *images)
    assert read(path, image_column="b.png", label_column="b.cls") == [(b"input", 5)]
    assert TarSource(path, image_column="b.png").name(0) == "a.tar:v1.0/a"
    with pytest.raises(DataError, match=r"a\.tar:v1\.0/a has 2 images"):
        TarSource(path)


@pytest.mark.parametrize("suffix", ["jpg", "cls"])
def test_members_that_are_apart_or_many_get_a_short_message(tmp_path, suffix):
    members = [(f"{n}.{end}", b"1") for end in ("jpg", "cls") for n in range(3)]
    with pytest.raises(DataError, match=r"sort"):
        TarSource(write(tmp_path / "a.tar", *members))
    members = [(f"photo.{n}.{suffix}", b"1") for n in range(1000)]
    with pytest.raises(DataError, match="photo") as caught:
        TarSource(write(tmp_path / "b.tar", *members))
    assert len(str(caught.value)) < 500


def test_shards_are_read_in_their_order(tmp_path):
    for number in (2, 0, 1):
        samples = [(b"image %d" % number, number), (b"other", 9)]
        write_tar(str(tmp_path / f"train-{number:03d}.tar"), samples)
    expected = [(b"image 0", 0), (b"other", 9), (b"image 1", 1), (b"other", 9)]
    assert read(tmp_path)[:4] == expected
    assert read(tmp_path / "train-*.tar")[:4] == expected
    assert read(str(tmp_path / "train-{000..001}.tar")) == expected
    assert read(str(tmp_path / "train-{001..002}.tar"))[0] == expected[2]
    source = open_source(tmp_path)
    assert source.name(5) == "train-002.tar:000000001"
    with pytest.raises(DataError, match="range"):
        TarSource(str(tmp_path / "train-{5..1}.tar"))
    with pytest.raises(DataError, match=r"train-003\.tar does not exist"):
        TarSource(str(tmp_path / "train-{000..003}.tar"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (member("../b.jpg"), r"\.\./b\.jpg"),
        (member("b.jpg", tarfile.SYMTYPE), "'b.jpg'"),
        (member("b.jpg", tarfile.CHRTYPE), "'b.jpg'"),
        (member("b.jpg"), r"a\.tar:b has no label"),
        (member("b.cls"), r"a\.tar:b has 0 images"),
        (member("x/b.png"), r"a\.tar:x/b has two members"),
    ],
)
def test_members_that_lead_out_or_are_invalid_are_reported(tmp_path, entry, message):
    with pytest.raises(DataError, match=message):
        TarSource(write(tmp_path / "a.tar", *PLAIN, (entry, b"")))


@pytest.mark.parametrize(
    ("texts", "noun"),
    [
        ({"json": b"{label: 3}"}, r"\.json"),
        ({"cls": b"-1"}, "a"),
        ({"json": b'{"label": 3.0}'}, "string"),
        ({"a.cls": b"1", "b.cls": b"1"}, r"one \.cls"),
    ],
)
def test_why_a_sample_has_no_label_is_told(tmp_path, texts, noun):
    members = [("a.jpg", b"image"), *((f"a.{suffix}", text) for suffix, text in texts.items())]
    with pytest.raises(DataError, match=rf"a\.tar:a.*{noun}"):
        TarSource(write(tmp_path / "a.tar", *members))


def header_of(size: int, kind: bytes) -> bytes:
    entry = member("huge", kind)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x1f\x8b" * 400, "compressed"),
        (header_of(2**50, b"L"), "bytes of names"),
        (header_of(2**50, b"x"), "bytes of names"),
        (header_of(2**50, b"0"), "truncated"),
        (header_of(2**20, b"x") + b"1" * 2**20, "200 digits"),  # tarfile would take hours
        (bytes(1024), "no samples"),
        (bytes(1024) + b"x" * 512, "end mark"),
    ],
)
def test_hostile_headers_are_refused_in_bounded_memory(tmp_path, data, message):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match=message):
        TarSource(tmp_path / "a.tar")


def test_an_archive_truncated_anywhere_is_refused(tmp_path):
    path = write(tmp_path / "a.tar", *PLAIN)
    data = path.read_bytes()
    end = data.rindex(b"image b") + 512  # followed by the zeros of the end
    for length in range(0, end, 100):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="truncated"):
            TarSource(path)
