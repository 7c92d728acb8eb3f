"""Files of groups, and the rates per group against brute force."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data.sources import LabelFileSource
from plsc.errors import DataError
from plsc.evaluate.embed import ImagesOf
from plsc.evaluate.groups import ACROSS, Groups, mean_rates, pair_rates, read_groups, search_rates
from plsc.evaluate.identification import identify
from plsc.evaluate.report import write_report
from plsc.evaluate.verification import wilson_interval
from tests.unit.evaluate.test_identification import made_data


def named(of, names="ab"):
    return Groups(tuple(names), np.array(of))


def counts_of(rates):
    """Accepted and all values of each rate."""
    return {
        title: {
            group: {rate: (round((found["value"] or 0) * found["count"]), found["count"])
                    for rate, found in of_group.items()}
            for group, of_group in table.items()
        }
        for title, table in rates.tables.items()
    }  # fmt: skip


PAIR = st.tuples(st.integers(-4, 4), st.booleans(), st.integers(0, 5), st.integers(0, 5))


@given(st.lists(PAIR, min_size=2, max_size=60), st.lists(st.integers(-1, 1), min_size=6, max_size=6))
def test_pairs_are_counted_within_and_across_groups_at_the_common_threshold(pairs, of):
    scores = np.array([score / 4 for score, *_ in pairs])
    is_same = np.array([same for _, same, *_ in pairs])
    is_same[:2] = True, False
    images = np.array([(one, other) for *_, one, other in pairs])
    found = counts_of(pair_rates(named(of), images, scores, is_same))
    negatives = scores[~is_same]
    assert list(found) == ["FAR 0.1"]
    # The lowest score at which few enough of all different pairs are accepted
    threshold = min(t for t in [*scores, np.inf] if np.mean(negatives >= t) <= 0.1)
    for name, belongs in (
        ("a", lambda one, other: of[one] == of[other] == 0),
        ("b", lambda one, other: of[one] == of[other] == 1),
        (ACROSS, lambda one, other: of[one] != of[other] and -1 not in (of[one], of[other])),
    ):
        inside = np.array([belongs(*pair) for pair in images])
        assert found["FAR 0.1"][name] == {
            rate: (int((scores[inside & kind] >= threshold).sum()), int((inside & kind).sum()))
            for rate, kind in (("TAR", is_same), ("FAR", ~is_same))
        }


@pytest.mark.parametrize("ties", [False, True])
def test_searches_are_counted_in_the_group_of_their_probe(ties):
    gallery, gallery_labels, probes, probe_labels = made_data(4, ties)
    of = np.random.default_rng(0).integers(-1, 2, len(probes))
    result = identify(gallery, gallery_labels, probes, probe_labels, candidates=3)
    is_mated = np.isin(probe_labels, gallery_labels[gallery_labels >= 0])
    found = counts_of(search_rates(named(of), is_mated, result))
    assert list(found) == ["closed set", "FPIR 0.1"]
    threshold = result.threshold_at_fpir[0.1]
    for number, name in enumerate("ab"):
        own, others = of[is_mated] == number, of[~is_mated] == number
        assert found["closed set"][name]["rank-1"] == ((result.ranks[own] == 1).sum(), own.sum())
        hits = (result.mate_scores >= threshold) & (result.ranks <= 3)
        assert found["FPIR 0.1"][name] == {
            "TPIR": (hits[own].sum(), own.sum()),
            "FPIR": ((result.top_scores[others] >= threshold).sum(), others.sum()),
        }


def test_means_have_intervals_of_the_sum_of_their_values():
    found = mean_rates(named([0, 1, 0, -1]), {"MAP@R": np.array([0.5, 1, 0.25, 0])}, "all queries")
    a, b = (found.tables["all queries"][name]["MAP@R"] for name in "ab")
    assert (a["value"], a["count"], b["value"], b["count"]) == (0.375, 2, 1, 1)
    assert a["interval"] == list(wilson_interval(0.75, 2))


def test_a_report_shows_counts_and_names_as_they_are(tmp_path):
    rng = np.random.default_rng(0)
    groups = named([0] * 30 + [1] * 3 + [2, 3], ("a", "b|c", "d", "<i>[e](f)"))
    labels = np.arange(35) // 2
    pairs = np.stack(np.triu_indices(35, 1), 1)
    is_same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    rates = pair_rates(groups, pairs, rng.random(len(pairs)), is_same)
    report = write_report(tmp_path, "Test", [rates.section("lfw groups")]).read_text()
    assert "| d | none of 0 | none of 0 |" in report
    assert "| b\\|c | " in report
    assert "| \\<i>[e\\](f) | " in report  # no HTML and no link in what is published
    values = json.loads((tmp_path / "report.json").read_text())["lfw groups"]
    assert values.items() >= rates.as_dict().items()


@pytest.fixture
def images(tmp_path):
    (tmp_path / "label.txt").write_text("a b.png 0\nc/d.png 1\ne.png 1\n")
    return ImagesOf(LabelFileSource(tmp_path), range(3))


def test_images_are_named_as_in_their_list_by_their_path_or_by_their_number(images, tmp_path):
    file = tmp_path / "groups.tsv"
    file.write_bytes(
        b"\xef\xbb\xbfa b.png\tyoung\r\n\r\n" + f"{tmp_path}/c/d.png\told\nx.png\told\n".encode()
    )
    groups = read_groups(str(file), images)
    assert (groups.names, groups.of.tolist()) == (("old", "young"), [1, 0, -1])
    assert "'x.png'" in groups.notes[1]
    file.write_text("0\tx\n2\ty\n2\ty\n")
    assert read_groups(str(file), [b""] * 4).of.tolist() == [0, -1, 1, -1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "none of the images"),
        (b"e.png old\n", r"groups\.tsv:1: .*'e\.png old'"),
        (b"e.png\told\nc/d.png\t\n", r"groups\.tsv:2: .*'c/d\.png"),
        (b"e.png\tacross groups\n", r"groups\.tsv:1: "),
        (b"e.png\told\n\ne.png\tyoung\n", r"tsv:3: .*'e\.png'"),
        (None, r"groups\.tsv"),
    ],
)
def test_a_bad_file_is_an_error_that_names_file_and_line(images, tmp_path, content, message):
    if content is not None:
        (tmp_path / "groups.tsv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_groups(str(tmp_path / "groups.tsv"), images)
