from __future__ import annotations

from collections import Counter

from plsc.data.samples import BadSample, BadSampleList, replacement
from plsc.errors import DataError


def sample(number: int, kind: str = "undecodable") -> BadSample:
    return BadSample(kind, f"images/{number}.jpg (label.txt:{number + 1}): is damaged")


def test_each_bad_sample_is_listed_once_with_its_kind_file_and_line(tmp_path):
    listing = BadSampleList(tmp_path)
    listing.add([sample(1), sample(2, "missing")])
    listing.add([sample(1), sample(3)])
    assert listing.path.read_text().splitlines() == [
        "undecodable\timages/1.jpg (label.txt:2): is damaged",
        "missing\timages/2.jpg (label.txt:3): is damaged",
        "undecodable\timages/3.jpg (label.txt:4): is damaged",
    ]
    assert listing.counts == Counter(undecodable=2, missing=1)
    assert listing.summary() == "2 undecodable, 1 missing"


def test_a_resumed_run_continues_the_list(tmp_path):
    (tmp_path / "bad_samples.txt").write_bytes(b"\xff\xfe\x00 what is this\n")
    BadSampleList(tmp_path).add([sample(1)])
    resumed = BadSampleList(tmp_path)
    resumed.add([sample(1), sample(2)])
    assert len(resumed.path.read_bytes().splitlines()) == 3
    assert resumed.counts["undecodable"] == 2


def test_the_list_is_limited_and_the_count_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("plsc.data.samples.MAX_LISTED", 5)
    listing = BadSampleList(tmp_path)
    listing.add([sample(number) for number in range(20)])
    assert len(listing.path.read_text().splitlines()) == 5
    assert listing.counts["undecodable"] == 20


def test_a_multi_line_error_becomes_one_line():
    bad = BadSample.from_error(DataError("images/1.jpg: a\nb", kind="missing"))
    assert bad == BadSample("missing", "images/1.jpg: a b")


def test_replacements_are_distributed_over_all_samples():
    drawn = Counter(replacement(0, 0, index, 1, 10) for index in range(5000))
    assert set(drawn) == set(range(10))
    assert max(drawn.values()) < 1.3 * min(drawn.values())
    assert replacement(0, 0, 1, 1, 10**6) != replacement(0, 0, 1, 2, 10**6)
    assert replacement(0, 0, 1, 1, 10**6) != replacement(0, 1, 1, 1, 10**6)
