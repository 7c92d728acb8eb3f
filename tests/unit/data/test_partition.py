import json
import os
import string
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.partition import PartitionOptions, partition, parts, verify
from plsc.data.partition.inputs import LEAST, Budget
from plsc.data.partition.local import BucketWriter
from plsc.data.partition.parts import (
    PADDING,
    checksum,
    line_keys,
    lines_per_rank,
    rank_bounds,
)
from plsc.errors import DataError, OptionError
from plsc.seeds import hash_key


def expected_parts(lines: list[bytes], nranks: int, seed: int) -> list[list[bytes]]:
    """The reference implementation, line by line."""
    each = -(-len(lines) // nranks)
    order = sorted(range(len(lines)), key=lambda i: hash_key(seed, i))
    padding = sorted(range(len(lines)), key=lambda i: hash_key(seed, PADDING, i))
    while len(order) < each * nranks:
        order += padding[: each * nranks - len(order)]
    return [[lines[i] for i in order[r * each : (r + 1) * each]] for r in range(nranks)]


def some_lines(count: int, longest: int = 80, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [
        b"%s%d\t%d" % (b"A" * int(rng.integers(1, longest)), i, rng.integers(0, 1000)) for i in range(count)
    ]


def write_set(folder: Path, lines: list[bytes], files: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data{index}.txt" for index in range(files)]
    cuts = [len(lines) * index // files for index in range(files + 1)]
    for name, begin, end in zip(names, cuts, cuts[1:], strict=False):
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines[begin:end]))
    (folder / "file_list.txt").write_text("\n".join(names))
    return folder


def read_parts(folder: Path) -> list[list[bytes]]:
    names = (folder / "file_list.txt").read_text().split()
    texts = [(folder / name).read_bytes() for name in names]
    assert all(text.endswith(b"\n") for text in texts)
    return [text.split(b"\n")[:-1] for text in texts]


@dataclass(frozen=True)
class TinyBudget(Budget):
    """So small that a few lines fill many buckets, buckets are split, and lines are longer than a block."""

    block = 64
    bucket = 700


WAYS = ["usual", "many buckets", "plain", "plain many buckets"]


def choose(monkeypatch, way: str, workers: int = 2) -> None:
    """As usual, or with buckets that are split; each with and without the C library."""
    if "many buckets" in way:
        monkeypatch.setattr(PartitionOptions, "budget", TinyBudget(LEAST, workers))
    if "plain" in way:
        monkeypatch.setattr("plsc.data.native.function", lambda *_: None)
        monkeypatch.setattr(parts, "function", lambda *_: None)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    choose(monkeypatch, request.param)
    return request.param


def test_the_parts_equal_the_reference_implementation(tmp_path, way):
    longest = 80 if "many buckets" in way else 600_000  # longer than a block of a checksum
    lines = some_lines(208) + some_lines(3, longest)
    folder = write_set(tmp_path, lines)
    manifest = partition(PartitionOptions(str(folder), 4, seed=5))
    assert read_parts(folder / "partition_4") == expected_parts(lines, 4, 5)
    assert [manifest[name] for name in ("lines", "lines_per_rank", "padding_lines")] == [211, 53, 1]
    assert verify(PartitionOptions(str(folder), 4)) == manifest


def test_every_small_number_of_lines_and_ranks(tmp_path, monkeypatch):
    choose(monkeypatch, "many buckets")
    # Thousands of files need not be flushed to the disk.
    monkeypatch.setattr("plsc.storage.disk.sync", lambda _: None)
    for count in (1, 2, 4, 7, 25):
        folder = write_set(tmp_path / str(count), lines := some_lines(count, 30), files=2)
        for nranks in (1, 2, 3, 9):
            partition(PartitionOptions(str(folder), nranks))
            parts = read_parts(folder / f"partition_{nranks}")
            assert parts == expected_parts(lines, nranks, 0)
            assert {len(part) for part in parts} == {-(-count // nranks)}
            assert set(chain(*parts)) == set(lines)


content = st.text("ABC+/=", min_size=1, max_size=150).map(str.encode)
sample = st.builds(lambda data, label: b"%s\t%d" % (data, label), content, st.integers(0, 10**18 - 1))
blank = st.sampled_from([b"", b"", b" ", b"\t"])


@given(
    files=st.lists(st.lists(st.one_of(sample, sample, sample, blank), max_size=8), min_size=1, max_size=4),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=1, max_size=3),
    has_bom=st.booleans(),
    is_cut=st.booleans(),
    nranks=st.integers(1, 5),
    way=st.sampled_from(WAYS),
)  # fmt: skip
@settings(max_examples=40)
def test_any_content_keeps_its_bytes(tmp_path_factory, files, ends, has_bom, is_cut, nranks, way):
    folder = tmp_path_factory.mktemp("set")
    names = []
    for index, lines in enumerate(files):
        data = b"".join(map(b"".join, zip(lines, cycle(ends), strict=False)))
        data = b"\xef\xbb\xbf" * has_bom + (data.removesuffix(b"\n") if is_cut else data)
        (folder / f"{index}.txt").write_bytes(data)
        names.append(f"{index}.txt")
    (folder / "file_list.txt").write_text("\n".join(names))
    samples = [line for line in chain(*files) if line.strip()]
    options = PartitionOptions(str(folder), nranks)
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose(monkeypatch, way)
        if not samples:
            with pytest.raises(DataError, match="contain no samples"):
                partition(options)
            assert not (folder / f"partition_{nranks}").exists()
            return
        partition(options)
        assert read_parts(folder / f"partition_{nranks}") == expected_parts(samples, nranks, 0)
        verify(options)


def test_a_file_listed_twice_is_refused(tmp_path):
    folder = write_set(tmp_path, some_lines(9))
    (folder / "link.txt").symlink_to("data1.txt")
    (folder / "file_list.txt").write_text("data0.txt\ndata1.txt\nlink.txt\n")
    with pytest.raises(DataError, match="same file"):
        partition(PartitionOptions(str(folder), 2))


def test_every_line_is_equally_likely_at_every_position():
    lines, seeds = 16, 4_000
    counts = np.zeros((lines, lines))
    for seed in range(seeds):
        counts[np.argsort(line_keys(seed, np.arange(lines))), np.arange(lines)] += 1
    chi_square = ((counts - seeds / lines) ** 2).sum() / (seeds / lines)
    assert chi_square < 312  # 0.9999 quantile of 225 degrees of freedom


def test_ranks_begin_at_the_right_sorted_keys():
    for lines, nranks in ((1, 1), (1, 5), (5, 3), (40, 9), (100_003, 8), (3_000_001, 1000)):
        each = lines_per_rank(lines, nranks)
        keys = np.sort(line_keys(2, np.arange(lines)))
        assert rank_bounds(2, lines, nranks).tolist() == keys[each::each].tolist()


def test_keys_equal_those_of_plsc_seeds():
    numbers = [0, 1, 7, 10**10, 2**63 - 1]
    for seed in (0, 5, -3, 2**64 - 1):
        assert line_keys(seed, np.array(numbers)).tolist() == [hash_key(seed, i) for i in numbers]


def test_the_parts_are_flushed_to_the_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr("plsc.storage.disk.sync", lambda path: synced.append(Path(path).name))
    folder = write_set(tmp_path / "set", lines := some_lines(50))
    partition(PartitionOptions(str(folder), 3, output_dir=str(tmp_path / "out")))
    assert read_parts(tmp_path / "out") == expected_parts(lines, 3, 0)
    expected = {*parts.part_names(3), "file_list.txt", "manifest.json", ".out.plsc-partial", tmp_path.name}
    assert set(synced) == expected


def test_lines_that_are_not_base64_are_reported_or_skipped(tmp_path, way, messages):
    good = [b"data:image/png;base64,QU-_\t3", *some_lines(60)]
    others = {*range(256)} - {*(string.ascii_letters + string.digits + "+/-_=\n").encode()}
    bad = [b"QUJD%cQUJD\t5" % byte for byte in sorted(others)]
    folder = write_set(tmp_path, good[:50] + bad + good[50:], files=1)
    with pytest.raises(DataError, match=r"data0\.txt:51: .*base64"):
        partition(PartitionOptions(str(folder), 2))
    assert sorted(path.name for path in folder.iterdir()) == ["data0.txt", "file_list.txt"]
    options = PartitionOptions(str(folder), 2, bad_lines="skip")
    manifest = partition(options)
    assert manifest["skipped_lines"] == len(bad)
    assert all("base64" in message for message in messages[:10])
    assert read_parts(folder / "partition_2") == expected_parts(good, 2, 0)
    assert verify(options) == manifest


def test_bad_and_blank_lines_are_skipped_counted_and_logged(tmp_path, way, messages):
    good = some_lines(20)
    folder = write_set(tmp_path, [*good[:7], b"", b"A\tnan", *good[7:], b"  "], files=1)
    manifest = partition(PartitionOptions(str(folder), 2, bad_lines="skip"))
    assert read_parts(folder / "partition_2") == expected_parts(good, 2, 0)
    assert (manifest["blank_lines"], manifest["skipped_lines"]) == (2, 1)
    message = "\n".join(messages)
    assert "2 blank lines" in message
    assert "data0.txt:9: " in message


def test_a_folder_that_another_user_prepared_is_not_used(tmp_path):
    folder = write_set(tmp_path, some_lines(9))
    (tmp_path / "out").mkdir()
    prepared = tmp_path / "out/.parts.plsc-partial"
    prepared.mkdir()
    (prepared / "kept").touch()
    try:
        os.chown(prepared, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can make a folder of another user")
    with pytest.raises(DataError, match="another user"):
        partition(PartitionOptions(str(folder), 2, output_dir=str(tmp_path / "out/parts")))
    assert (prepared / "kept").exists()


@pytest.mark.parametrize("output", ["memory://private-out", "out"])
@pytest.mark.parametrize("is_given", [True, False])
def test_temporary_files_are_in_private_folders(tmp_path, monkeypatch, output, is_given):
    folder = write_set(tmp_path / "set", some_lines(9))
    (tmp_path / "tmp").mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    add, modes = BucketWriter.add, []

    def add_and_look(self, *arguments):
        places = [*(tmp_path / "tmp").iterdir(), *tmp_path.glob(".buckets*")]
        modes.extend(place.stat().st_mode & 0o777 for place in places)
        return add(self, *arguments)

    monkeypatch.setattr(BucketWriter, "add", add_and_look)
    target = output if "://" in output else str(tmp_path / output)
    temporary = str(tmp_path / "tmp") if is_given else None
    partition(PartitionOptions(str(folder), 2, output_dir=target, tmp_dir=temporary))
    assert set(modes) == {0o700}
    assert not [*(tmp_path / "tmp").iterdir()]
    if "://" in output:
        fsspec.filesystem("memory").rm("/private-out", recursive=True)


def test_a_line_of_the_file_list_is_one_name_with_its_spaces(tmp_path):
    folder = write_set(tmp_path, some_lines(4), files=1)
    listing = folder / "file_list.txt"
    (folder / "data0.txt").rename(folder / "part")
    listing.write_text("part 2\n")
    with pytest.raises(DataError, match=r"file_list\.txt:1: .*part 2"):
        partition(PartitionOptions(str(folder), 2))
    name = "part 2\u2028\x0b"
    (folder / "part").rename(folder / f"{name} x")
    listing.write_text(f"\n  {name} x \r\n")
    assert partition(PartitionOptions(str(folder), 2))["lines"] == 4


def test_an_input_that_changes_during_the_run_is_an_error(tmp_path, monkeypatch):
    folder, add = write_set(tmp_path, some_lines(9)), BucketWriter.add
    monkeypatch.setattr(
        BucketWriter, "add", lambda *given: (add(*given), os.utime(folder / "data0.txt", ns=(1, 1)))
    )
    with pytest.raises(DataError, match=r"data0\.txt changed"):
        partition(PartitionOptions(str(folder), 2))
    assert not (folder / "partition_2").exists()


class TestVerify:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        folder = write_set(tmp_path, some_lines(41))
        partition(PartitionOptions(str(folder), 3))
        return folder

    def refuses(self, folder: Path, problem: str) -> None:
        with pytest.raises(DataError, match=problem):
            verify(PartitionOptions(str(folder), 3))

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("partition_3/part_1.txt", lambda data: bytes([data[0] ^ 1]) + data[1:]),
            ("partition_3/part_2.txt", lambda data: data.split(b"\n", 1)[1]),
            ("partition_3/part_0.txt", lambda data: None),
            ("data1.txt", lambda data: b"QUJD\t1\n"),
        ],
    )
    def test_a_changed_file_is_named(self, folder, name, change):
        path, data = folder / name, change((folder / name).read_bytes())
        path.unlink() if data is None else path.write_bytes(data)
        self.refuses(folder, path.name)

    def test_parts_with_other_lines_are_detected_despite_a_matching_manifest(self, folder):
        part = folder / "partition_3/part_1.txt"
        data = part.read_bytes()
        first, _, rest = data.split(b"\n", 2)
        data = b"\n".join([first, first, rest])
        part.write_bytes(data)
        manifest = json.loads((folder / "partition_3/manifest.json").read_text())
        manifest["parts"][1].update(size=len(data), checksum=f"{checksum(data):016x}")
        (folder / "partition_3/manifest.json").write_text(json.dumps(manifest))
        self.refuses(folder, "differ")

    @pytest.mark.parametrize(
        "change",
        [
            {"format": "other"}, {"lines": "41"}, {"parts": []}, {"lines_per_rank": 10**12}, {"nranks": True},
            {"parts": [{"name": "../x", "size": 1, "checksum": "0"}] * 3},
        ],
    )  # fmt: skip
    def test_an_invalid_manifest_is_refused(self, folder, change):
        path = folder / "partition_3/manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        self.refuses(folder, r"manifest\.json")


@pytest.mark.parametrize(
    "wrong", [{"engine": "ray"}, {"nranks": 0}, {"memory": 2**20}, {"output_name": "../x"}]
)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        PartitionOptions(**{"data_dir": "x", "nranks": 2, **wrong})


def test_the_command_starts_without_importing_torch():
    code = "import sys, plsc.data.partition; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
