"""Maps from old to new embeddings: formulas, choice, error; galleries and stores that the command maps."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from plsc import open_embeddings
from plsc.checkpoint import load_weights
from plsc.cli import main
from plsc.errors import DataError
from plsc.export.folder import checksum_of
from plsc.gallery import open_gallery, write_gallery
from plsc.gallery.embedder import open_embedder
from plsc.gallery.gallery import open_store
from plsc.gallery.store import New
from plsc.gallery.upgrade import Pairs, fit_map, ridges, rotation
from tests.images import class_folders, write_dataset
from tests.postgres_server import PASSWORD
from tests.system.small_entry import entry

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


# The command `plsc gallery upgrade`.

CLASSES = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two epochs of a run, `old` and `new`, a run with class names, the embeddings of images, a gallery."""
    folder = tmp_path_factory.mktemp("upgrade")
    dataset = write_dataset(folder / "faces", CLASSES, per_class=2)
    entry(dataset, folder / "run", set_train_epochs=6, set_train_batch_size=24).train()
    (folder / "run/4").rename(folder / "old")
    (folder / "run/5").rename(folder / "new")
    class_folders(dataset, folder / "named_faces", {label: f"person {label}" for label in range(CLASSES)})
    named = entry(folder / "named_faces", folder / "named", set_train_epochs=4, set_train_batch_size=24)
    named.set_pretrained(str(folder / "old"))
    named.train()
    for name in ("old", "new"):
        predicted = ["--checkpoint.load_dir", str(folder / name), "--images", str(dataset / "images")]
        assert main(["predict", *predicted, "--output", str(folder / f"by_{name}"), "--quiet"]) == 0
    indexed = ["--embeddings", str(folder / "by_old")]
    assert main(["index", str(folder / "old"), str(folder / "gallery"), *indexed]) == 0
    return folder


def model_of(run):
    return checksum_of(load_weights(run))


def upgrade(folder, source, target, *more, old="old", new="new"):
    runs = ["--from", folder / old, "--to", folder / new]
    return main([str(word) for word in ("gallery", "upgrade", source, target, *runs, *more)])


def cosines_of(folder, vectors):
    """Cosines of mapped vectors with the embeddings of the same images by the new network."""
    real = open_embeddings(folder / "by_new")["embeddings"][:]
    return (vectors * real).sum(axis=1) / np.linalg.norm(real, axis=1) / np.linalg.norm(vectors, axis=1)


def vectors_of(place):
    return np.stack([one.vector for one in place.read(0, 10**6)])


def test_a_mapped_gallery_is_near_the_real_embeddings_and_says_what_it_is(folder, tmp_path, capsys):
    target = tmp_path / "new"
    assert upgrade(folder, folder / "gallery", target) == 0
    shown = capsys.readouterr().out
    before, mapped = open_gallery(folder / "gallery"), open_gallery(target, model_of(folder / "new"))
    assert cosines_of(folder, vectors_of(mapped)).mean() > 0.9
    about = json.loads(mapped.about["mapped"])
    assert about["from"] == model_of(folder / "old")
    assert (about["classes"], about["images"], about["bound"]) == (CLASSES, 0, None)
    assert f"{2 * CLASSES} entries; {about['method']}, fitted on {CLASSES} classes and 0 images" in shown
    assert "upper bound" in shown
    assert about["is_upper_bound"]
    assert [mapped.name(i) for i in range(len(mapped))] == [before.name(i) for i in range(len(before))]
    assert "mapped" not in before.about


def test_images_of_both_networks_are_used_too_and_give_a_bound(folder, tmp_path, messages):
    anchors = ["--anchors-from", folder / "by_old", "--anchors-to", folder / "by_new"]
    assert upgrade(folder, folder / "gallery", tmp_path / "new", *anchors) == 0
    about = json.loads(open_gallery(tmp_path / "new").about["mapped"])
    assert about["classes"] + about["images"] > 0
    assert np.mean(cosines_of(folder, vectors_of(open_gallery(tmp_path / "new"))) >= about["bound"]) > 0.9
    embedder = open_embedder(folder / "named/3")
    images = str(folder / "faces/images")
    predicted = ["--checkpoint.load_dir", str(folder / "named/3"), "--images", images, "--quiet"]
    assert main(["predict", *predicted, "--output", str(tmp_path / "by_named")]) == 0
    real = open_embeddings(tmp_path / "by_named")["embeddings"][:]
    write_gallery(tmp_path / "named", real, model=embedder.fingerprint)
    anchors[1] = tmp_path / "by_named"
    assert upgrade(folder, tmp_path / "named", tmp_path / "other", *anchors, old="named/3") == 0
    mapped = open_gallery(tmp_path / "other", model_of(folder / "new"))
    assert cosines_of(folder, vectors_of(mapped)).mean() > cosines_of(folder, real).mean()
    about = json.loads(mapped.about["mapped"])
    assert (about["classes"], about["images"]) == (0, 2 * CLASSES)
    assert "class weights are not used" in "".join(messages)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_mapped_store_keeps_ids_and_continues_and_is_copied_but_not_mapped_again(
    folder, tmp_path, kind, request, messages
):
    places = [tmp_path / "old.sqlite", tmp_path / "new.sqlite"]
    if kind == "postgres":
        places = [request.getfixturevalue("database")] * 2  # a table per network
    models = [model_of(folder / name) for name in ("old", "new")]
    with contextlib.closing(open_store(str(places[0]), models[0], 8)) as store:
        entries = open_gallery(folder / "gallery").read(0, 10**6)
        store.write([New(one.name, one.vector, b"jpeg %d" % one.id) for one in entries])
        store.write([3, 77])
        before = store.read(0, 10**6)
    for _ in range(2):  # the second one finds all entries
        assert upgrade(folder, places[0], places[1]) == 0
    with contextlib.closing(open_store(str(places[1]), models[1], 8)) as store:
        after = store.read(0, 10**6)
        assert json.loads(store.read(0, 1)[0].mapped)["from"] == models[0]
    for one, other in zip(before, after, strict=True):
        assert replace(one, vector=None) == replace(other, vector=None, mapped="")
        assert json.loads(other.mapped)["from"] == models[0]
    kept = [one.id - 1 for one in before]
    real = open_embeddings(folder / "by_new")["embeddings"][:][kept]
    mapped = np.stack([one.vector for one in after])
    assert ((mapped * real).sum(axis=1) / np.linalg.norm(real, axis=1)).mean() > 0.9
    how = ["--fingerprint", models[1][:16]] if kind == "postgres" else []
    assert main(["gallery", "copy", str(places[1]), str(tmp_path / "copy"), *how]) == 0
    copy = open_gallery(tmp_path / "copy", models[1])
    assert json.loads(copy.about["mapped"])["from"] == models[0]
    for place in (places[1], tmp_path / "copy"):
        assert upgrade(folder, place, tmp_path / "again", old="new", new="named/3") == 1
        assert "older network" in messages[-1]
    with contextlib.closing(open_store(str(places[1]), models[1], 8)) as store:
        [new] = store.write([New("new", real[0] / np.linalg.norm(real[0]), b"")])
        assert store.read(new - 1, 1)[0].mapped == ""
    assert main(["gallery", "copy", str(places[1]), str(tmp_path / "mixed"), *how]) == 1
    assert "mapped" in messages[-1]
    assert PASSWORD not in "".join(messages)


def test_what_cannot_be_mapped_is_one_message_and_writes_nothing(folder, tmp_path, messages):
    gallery, target = folder / "gallery", tmp_path / "target"
    few = write_dataset(tmp_path / "few", 20, per_class=2)
    assert main(["index", str(folder / "old"), str(tmp_path / "classes")]) == 0
    entry(few, tmp_path / "centers_run", set_sub_centers=2).train()
    other = ["--checkpoint.load_dir", str(folder / "new"), "--images", str(few / "images"), "--quiet"]
    assert main(["predict", *other, "--output", str(tmp_path / "by_few")]) == 0
    exported = [str(tmp_path / "flipped"), "--classes", "--flip", "--quiet"]
    assert main(["export", str(folder / "new"), *exported]) == 0
    by_old, by_new = folder / "by_old", folder / "by_new"
    for source, more, how, message in [
        (gallery, [], {"old": "new", "new": "old"}, "another network"),
        (gallery, [], {"new": "named/3"}, "class names"),
        (gallery, ["--anchors-from", by_new, "--anchors-to", by_old], {}, "by_new"),
        (gallery, ["--anchors-from", by_old, "--anchors-to", tmp_path / "by_few"], {}, "by_few"),
        (gallery, [], {"new": tmp_path / "centers_run/0"}, "sub-centres"),
        (gallery, ["--anchors-from", by_new], {}, "--anchors-to"),
        (tmp_path / "classes", [], {}, "classes"),
        (gallery, [], {"new": tmp_path / "flipped"}, "mirrored"),
        (gallery, [], {"new": "missing"}, "missing"),
    ]:
        assert upgrade(folder, source, target, *more, **how) == 1
        assert message in messages[-1]
        assert not target.exists()
    assert upgrade(folder, gallery, gallery) == 1
