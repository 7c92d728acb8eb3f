from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.errors import DataError
from plsc.evaluate import identification
from plsc.evaluate import retrieval as module
from plsc.evaluate.report import write_report
from plsc.evaluate.retrieval import retrieval
from tests.unit.evaluate.test_identification import exact_units


def reference(embeddings, labels):
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
def test_rates_equal_brute_force_with_ties_against_the_query(chunk, cells, images):
    array = np.array(images)
    labels, embeddings = array[:, 0], array[:, 1:].astype(np.float32)
    expected = reference(embeddings, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identification, "_CHUNK", chunk)
        patch.setattr(module, "_CELLS", cells)
        if not expected:
            with pytest.raises(DataError, match="no class has two images; retrieval needs"):
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


def test_values_do_not_depend_on_tiles_to_the_last_bit(monkeypatch):
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(size=(200, 8)).astype(np.float32), rng.integers(0, 12, 200) ** 2 // 12
    whole = retrieval(embeddings, labels)
    monkeypatch.setattr(identification, "_CHUNK", 7)
    monkeypatch.setattr(module, "_CELLS", 50)
    assert np.array_equal(retrieval(embeddings, labels).values, whole.values)


def test_images_alone_in_their_class_are_searched_but_are_no_queries(tmp_path):
    embeddings = np.array([[1, 0], [0.9, 0.1], [1, 0.05]], np.float32)
    result = retrieval(embeddings, np.array([4, 4, 9]))
    assert (result.queries, result.single_images, result.precision_at_1) == (2, 1, 0)
    report = write_report(tmp_path, "Test", [result.section("shop")]).read_text()
    assert "| 0.000000 | 0.000000 | 0.000000 | 3 | 2 | 2 | 1 |" in report
    assert "Single images, the only ones of their class, are searched, but are no queries." in report


def test_unusable_embeddings_raise_an_error():
    for embeddings, message in ((np.array([[1.0], [2], [np.nan]]), "query 2"), (np.ones((4, 2)), "shape")):
        with pytest.raises(DataError, match=message):
            retrieval(embeddings.astype(np.float32), np.array([0, 0, 1]))
