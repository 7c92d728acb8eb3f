"""Maps from old to new embeddings: the formulas, their choice, their error, and what cannot be mapped."""

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.gallery.upgrade import Pairs, fit_map, ridges, rotation

OLD, NEW = 24, 32


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def related(count, seed=0, noise=0.2, old=OLD, new=NEW, world=0):
    """Embeddings of the same things by two networks of the world `world`, which differ by noise."""
    size = max(old, new)
    turned = np.linalg.qr(np.random.default_rng(world).standard_normal((size, size)))[0][:old, :new]
    rng = np.random.default_rng([seed, 1])
    ours = unit(rng.standard_normal((count, old)))
    return ours, unit(ours @ turned + noise * rng.standard_normal((count, new)) / np.sqrt(new))


def pairs(ours, theirs):
    """Pairs whose old rows are stored in another order."""
    order = np.random.default_rng(3).permutation(len(ours))
    return Pairs(ours[order], theirs, (np.argsort(order), np.arange(len(theirs))))


def cosines(one, other):
    return (unit(one) * unit(other)).sum(axis=1)


def test_the_rotation_is_the_polar_factor_and_ridges_solve_the_extended_least_squares_problem():
    ours, theirs = related(300, new=OLD)
    product = ours.T @ theirs
    values, vectors = np.linalg.eigh(product.T @ product)
    expected = product @ (vectors / np.sqrt(values)) @ vectors.T  # X'Y (Y'X X'Y)^(-1/2)
    np.testing.assert_allclose(rotation(product), expected, atol=1e-10)
    ours, theirs = related(300)
    penalties = np.array([0.01, 1.0, 30.0])
    for penalty, found in zip(penalties, ridges(ours.T @ ours, ours.T @ theirs, penalties), strict=True):
        rows = np.concatenate([ours, np.sqrt(penalty) * np.eye(OLD)])
        targets = np.concatenate([theirs, np.zeros((OLD, NEW))])
        np.testing.assert_allclose(found, np.linalg.lstsq(rows, targets, rcond=None)[0], atol=1e-10)


@pytest.mark.parametrize(("old", "new"), [(24, 24), (24, 32), (32, 24)])
def test_embeddings_that_differ_by_a_linear_map_are_mapped_exactly(old, new):
    ours, theirs = related(400, noise=0, old=old, new=new)
    found = fit_map(pairs(ours, theirs))
    more, real = related(50, seed=5, noise=0, old=old, new=new)
    assert cosines(found.apply(more), real).min() > 0.999
    assert found.about["cosine"] > 0.999
    assert found.apply(np.zeros((1, old), np.float32)).tolist() == [[0] * new]


def test_the_chosen_map_is_no_worse_than_any_other_and_its_cosine_is_that_of_new_pairs():
    ours, theirs = related(4000, noise=1.0)
    found = fit_map(pairs(3 * ours, 0.5 * theirs))  # the norms do not count
    more, real = related(4000, seed=7, noise=1.0)
    mean = cosines(found.apply(more), real).mean()
    others = [rotation(ours.T @ theirs), *ridges(ours.T @ ours, ours.T @ theirs, np.array([0.1, 1000.0]))]
    assert mean > max(cosines(more @ one, real).mean() for one in others) - 0.005
    assert found.about["cosine"] == pytest.approx(mean, abs=0.02)
    assert found.about["bound"] is None
    assert (found.about["classes"], found.about["images"]) == (4000, 0)


@pytest.mark.parametrize(
    ("classes", "images", "on"), [(3, 77, "images"), (20, 70, "images"), (300, 5, "class weights")]
)
def test_few_pairs_of_one_kind_are_used_and_the_error_is_measured_on_the_other(classes, images, on):
    with np.errstate(all="raise"):
        found = fit_map(pairs(*related(classes, noise=0.5)), pairs(*related(images, seed=2, noise=0.5)))
    assert found.about["measured_on"] == on
    assert found.about["is_upper_bound"] == (on == "class weights")
    assert found.about["classes"] + found.about["images"] >= max(classes, images)
    more, real = related(2000, seed=7, noise=0.5)
    assert found.about["cosine"] == pytest.approx(cosines(found.apply(more), real).mean(), abs=0.05)


def test_embeddings_that_did_not_change_are_kept():
    ours, _ = related(300, new=OLD)
    noise = np.random.default_rng(9).standard_normal(ours.shape)
    found = fit_map(pairs(ours, unit(ours + 0.05 * noise)))
    assert found.about["method"] == "identity"
    np.testing.assert_allclose(found.apply(ours), ours, atol=1e-6)


def test_images_and_class_weights_are_combined_if_that_is_better_and_left_out_if_not():
    few, many = related(120, noise=1.0), related(3000, seed=2, noise=1.0)
    both = fit_map(pairs(*many), pairs(*few))
    assert both.about["classes"] == 3000
    renamed = fit_map(pairs(many[0], np.random.default_rng(0).permutation(many[1])), pairs(*related(900)))
    assert (renamed.about["classes"], renamed.about["images"]) == (0, 900)


def test_95_percent_of_images_reach_the_bound_which_needs_200_images():
    assert fit_map(None, pairs(*related(199, noise=0.5))).about["bound"] is None
    shares = []
    for seed in range(20):
        found = fit_map(None, pairs(*related(400, seed=seed, noise=0.5)))
        more, real = related(2000, seed=1000 + seed, noise=0.5)
        shares.append((cosines(found.apply(more), real) >= found.about["bound"]).mean())
    assert 0.95 <= np.mean(shares) < 0.99


def test_too_few_renamed_or_infinite_pairs_are_errors():
    ours, theirs = related(2000)
    infinite = theirs.copy()
    infinite[150, 3] = np.nan
    for given, message in (
        ((pairs(ours[:60], theirs[:60]), pairs(ours[:0], theirs[:0])), "60 classes and 0 images"),
        ((pairs(*related(100, old=128, new=128)),), "100 classes .* 192"),
        ((pairs(ours, np.random.default_rng(0).permutation(theirs)),), "nearer to each other"),
        ((pairs(ours, infinite),), "not finite"),
    ):
        with pytest.raises(DataError, match=message):
            fit_map(*given)
