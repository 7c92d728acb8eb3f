import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.errors import DataError
from plsc.evaluate import identification
from plsc.evaluate.identification import identify, retrieval, split_gallery
from plsc.evaluate.report import write_report


def exact_units(embeddings):
    """Unit vectors as exact integers / 2^26, for products in Python integers."""
    norms = np.linalg.norm(np.asarray(embeddings, np.float64), axis=1)
    units = embeddings / np.where(norms == 0, 1, norms)[:, None]
    return np.rint(units * 2**26).astype(np.int64).astype(object)


def reference(gallery, gallery_labels, probes, probe_labels, candidates=50):
    """The protocol as written: NIST FRVT 1:N, one search after another."""
    scores = exact_units(probes) @ exact_units(gallery).T  # Python integers
    enrolled = [label if label >= 0 else f"distractor {i}" for i, label in enumerate(gallery_labels)]
    ranks, mates, tops = [], [], []
    for label, row in zip(probe_labels, scores, strict=True):
        best = {}
        for identity, score in zip(enrolled, row, strict=True):
            best[identity] = max(score, best.get(identity, score))
        if label in best:
            mate = best.pop(label)
            ranks.append(1 + sum(score >= mate for score in best.values()))
            mates.append(mate)
        else:
            tops.append(max(best.values()))

    def fnir_at(fpir):
        """Try every threshold at which some score lies, and one above all."""
        found = []
        for threshold in {*tops, *mates, max(tops + mates) + 1}:
            if sum(top >= threshold for top in tops) <= fpir * len(tops):
                missed = [m < threshold or r > candidates for m, r in zip(mates, ranks, strict=True)]
                found.append(sum(missed) / len(missed))
        return min(found)

    return {
        "ranks": ranks,
        "mates": [mate / 2**52 for mate in mates],
        "tops": [top / 2**52 for top in tops],
        "cmc": [np.mean([rank <= k for rank in ranks]) for k in range(1, len(set(enrolled)) + 1)],
        "fnir": {f: fnir_at(f) for f in (0.1, 0.01, 0.001) if len(tops) * f >= 1},
    }


def made_data(seed, ties, gallery=60, probes=150, labels=12):
    """Gallery and probes of labels, some unknown, with distractors; `ties`: few values, so equal scores."""
    rng = np.random.default_rng(seed)

    def embeddings(count):
        if ties:
            return rng.integers(-1, 2, (count, 3)).astype(np.float32)  # zero embeddings too
        return rng.normal(size=(count, 8)).astype(np.float32)

    return (
        embeddings(gallery),
        rng.integers(-1, labels, gallery),
        embeddings(probes),
        rng.integers(-1, 2 * labels, probes),
    )


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize(("ties", "candidates"), [(False, 50), (True, 3)])
def test_rates_equal_the_protocol_as_written(monkeypatch, chunk, ties, candidates):
    monkeypatch.setattr(identification, "_CHUNK", chunk)
    data = made_data(chunk, ties)
    expected = reference(*data, candidates)
    result = identify(*data, candidates=candidates)
    assert result.ranks.tolist() == expected["ranks"]
    assert result.identities == len(set(data[1].tolist()) - {-1})
    assert result.distractors == (data[1] < 0).sum()
    assert result.mate_scores.tolist() == expected["mates"]
    assert result.top_scores.tolist() == expected["tops"]
    assert result.cmc().tolist() == pytest.approx(expected["cmc"])
    rates = [result.rank1, result.rank5, result.rank10]
    assert rates == pytest.approx([expected["cmc"][k - 1] for k in (1, 5, 10)])
    assert result.fnir_at_fpir == pytest.approx(expected["fnir"])


def test_thresholds_accept_exactly_the_share_of_non_mated_searches():
    data = made_data(3, ties=False, probes=3000)
    result = identify(*data)
    assert set(result.fnir_at_fpir) == {0.1, 0.01, 0.001}
    for fpir, threshold in result.threshold_at_fpir.items():
        accepted = int((result.top_scores >= threshold).sum())
        assert accepted == int(fpir * result.non_mated)
        missed = (result.mate_scores < threshold) | (result.ranks > result.candidates)
        assert result.fnir_at_fpir[fpir] == pytest.approx(missed.mean())


@pytest.mark.parametrize("non_mated", [0, 40])
def test_fpirs_below_one_search_are_absent_from_the_report(tmp_path, non_mated):
    gallery, gallery_labels, probes, _ = made_data(1, ties=False)
    labels = np.append(np.full(non_mated, 99), np.repeat(gallery_labels.max(), 150 - non_mated))
    result = identify(gallery, gallery_labels, probes, labels)
    assert list(result.fnir_at_fpir) == ([0.1] if non_mated else [])
    report = write_report(tmp_path, "Test", [result.section("faces")]).read_text()
    assert ("FPIR 0.01, 0.001" in report) == bool(non_mated)
    pictures = ["faces_cmc.png", *(["faces_fnir.png"] if non_mated else [])]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == pictures
    assert json.loads((tmp_path / "report.json").read_text())["faces"]["non_mated"] == non_mated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, gl, p, pl: (g[:0], gl[:0], p, pl), "no probe"),
        (lambda g, gl, p, pl: (g, gl * 0 - 1, p, pl * 0 - 1), "no probe"),
        (lambda g, gl, p, pl: (g, gl[1:], p, pl), "shape"),
        (lambda g, gl, p, pl: (g, gl, np.where(np.arange(150)[:, None] == 17, np.nan, p), pl), "probe 17"),
    ],
)
def test_unusable_data_raise_an_error(change, message):
    with pytest.raises(DataError, match=message):
        identify(*change(*made_data(0, ties=False)))


def test_split_enrols_the_first_image_of_every_other_class():
    labels = np.array([7, 3, 3, 9, 7, 3, 9, 9, 11])
    assert np.flatnonzero(split_gallery(labels)).tolist() == [1, 3]  # classes 3 and 9 of 3, 7, 9, 11


def retrieved(embeddings, labels):
    """Musgrave et al., one query after another: exact (MAP@R, R-precision, precision at 1), or None."""
    scores = exact_units(embeddings) @ exact_units(embeddings).T  # Python integers
    found = []
    for query, label in enumerate(labels):
        others = [other for other in range(len(labels)) if other != query]
        # Of equal scores, the wrong ones first
        results = sorted(others, key=lambda other: (-scores[query, other], labels[other] == label))
        right = [bool(labels[other] == label) for other in results]
        r = sum(right)
        if r:
            precisions = [Fraction(sum(right[:i]), i) for i in range(1, r + 1) if right[i - 1]]
            found.append((sum(precisions, Fraction(0)) / r, Fraction(sum(right[:r]), r), int(right[0])))
    return found


# Few values, so that many scores are equal; zero embeddings; classes of any size from 1 on.
IMAGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(-1, 1), st.integers(-1, 1), st.integers(-1, 1)),
    min_size=2, max_size=25,
)  # fmt: skip


@pytest.mark.parametrize(("chunk", "cells"), [(4096, 2**24), (3, 10)])
@given(images=IMAGES)
def test_retrieval_equals_brute_force_with_ties_against_the_query(chunk, cells, images):
    array = np.array(images)
    labels, embeddings = array[:, 0], array[:, 1:].astype(np.float32)
    expected = retrieved(embeddings, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identification, "_CHUNK", chunk)
        patch.setattr(identification, "_CELLS", cells)
        if not expected:
            with pytest.raises(DataError, match="no class"):
                retrieval(embeddings, labels)
            return
        result = retrieval(embeddings, labels)
    assert result.values == pytest.approx(np.array(expected, float), abs=1e-15)
    means = [result.map_at_r, result.r_precision, result.precision_at_1]
    assert means == pytest.approx(np.mean(np.array(expected, float), axis=0))
    sizes = np.bincount(labels)
    assert result.single_images == sum(sizes == 1)
    assert result.queries == len(expected) == sum(sizes[labels] > 1) == result.is_query.sum()
    assert (result.images, result.classes) == (len(labels), len(set(labels)))


def test_images_alone_in_their_class_are_searched_but_are_no_queries(tmp_path):
    embeddings = np.array([[1, 0], [0.9, 0.1], [1, 0.05]], np.float32)
    result = retrieval(embeddings, np.array([4, 4, 9]))
    assert (result.queries, result.single_images, result.precision_at_1) == (2, 1, 0)
    report = write_report(tmp_path, "Test", [result.section("shop")]).read_text()
    assert "| 0.000000 | 0.000000 | 0.000000 | 3 | 2 | 2 | 1 |" in report
    with pytest.raises(DataError, match="query 2"):
        retrieval(embeddings * np.array([[1], [1], [np.nan]], np.float32), np.array([0, 0, 1]))
