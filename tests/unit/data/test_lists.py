import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc import cli
from plsc.data.lists import Listing, draw_pairs, halves_of, held_out_of, read_listing, split, write_list
from plsc.data.sources import open_source
from plsc.data.writers import writer_of
from plsc.errors import DataError, OptionError
from plsc.evaluate.identification import split_gallery
from plsc.evaluate.verification import read_pair_list


def folders(root, images):
    """Write files at these paths, whose content is the path."""
    for path in images:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    return root


IMAGES = ["0000045/a.jpg", "007/b 1.jpg", '007/"c".jpg', "Zoë/d.jpg"]


def test_a_list_chooses_images_of_a_folder_and_keeps_digits_as_names(tmp_path):
    root = folders(tmp_path / "faces", IMAGES)
    _, listing = read_listing(root)
    counts = write_list(tmp_path / "list.tsv", listing, np.array([3, 1, 0]))
    assert counts == {"images": 3, "classes": 3}
    source, again = read_listing(tmp_path / "list.tsv", image_folder=root)
    assert [source[i] for i in range(3)] == [
        (b"Zo\xc3\xab/d.jpg", 2),
        (b'007/"c".jpg', 1),
        (IMAGES[0].encode(), 0),
    ]
    assert [*source.class_names.values()] == again.classes == ["0000045", "007", "Zoë"]
    assert again.paths == [listing.paths[i] for i in (3, 1, 0)]
    assert (again.labels == listing.labels[[3, 1, 0]]).all()


def test_links_of_an_image_folder_must_not_leave_it(tmp_path):
    folders(tmp_path, ["faces/a.jpg", "secret.jpg"])
    (tmp_path / "faces/b.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "list.tsv").write_text("path\tclass_name\na.jpg\tx\nb.jpg\tx\n")
    source = open_source(tmp_path / "list.tsv", image_folder=tmp_path / "faces")
    assert source[0] == (b"faces/a.jpg", 0)
    with pytest.raises(DataError, match="link"):
        source[1]
    (tmp_path / "other.tsv").write_text("path\tclass_name\n../secret.jpg\tx\n")
    with pytest.raises(DataError, match=r"other\.tsv:2: .*outside"):
        open_source(tmp_path / "other.tsv", image_folder=tmp_path / "faces")
    with pytest.raises(DataError, match="gone"):
        open_source(tmp_path / "list.tsv", image_folder="gone")


def test_numeric_labels_are_listed_by_their_digits_below_the_folder_of_the_images(tmp_path):
    folders(tmp_path / "images", ["a.jpg", "b.jpg", "c.jpg"])
    (tmp_path / "label.txt").write_text("a.jpg 9\n./b.jpg 10\nc.jpg 9\n")
    source, listing = read_listing(tmp_path)
    assert listing.folder == str(tmp_path / "images")
    assert (listing.paths, listing.classes) == (["a.jpg", "b.jpg", "c.jpg"], ["10", "9"])
    assert listing.labels.tolist() == [1, 0, 1]
    assert source.labels().tolist() == [9, 10, 9]


@pytest.mark.parametrize("name", [b"a\nb", b"a\tb", b" a", b"a\xff", "\u2028a".encode()])
def test_a_path_that_a_list_cannot_contain_is_refused(tmp_path, name):
    (tmp_path / "faces").mkdir()
    os.mkdir(os.path.join(os.fsencode(tmp_path / "faces"), name))  # noqa: PTH102, PTH118 - bytes
    (tmp_path / "faces" / os.fsdecode(name) / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be in a list"):
        read_listing(tmp_path / "faces")


def test_two_samples_of_one_file_are_refused_with_both_places(tmp_path):
    (tmp_path / "a.csv").write_text("path,label\nx/a.jpg,0\nb.jpg,0\n./x//a.jpg,1\n")
    with pytest.raises(DataError, match=r"a\.csv:4 .* a\.csv:2"):
        read_listing(tmp_path / "a.csv")
    writer_of("b.rec")(str(tmp_path / "b.rec"), [(b"image", 0)])
    with pytest.raises(DataError, match=r"b\.rec"):  # its images are no files
        read_listing(tmp_path / "b.rec")


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def listing_of(images):
    """A listing with these numbers of images per class."""
    labels = np.repeat(np.arange(len(images)), images)
    paths = [f"{label}/{number}.jpg" for number, label in enumerate(labels)]
    return Listing("faces", paths, labels, [f"{label:03d}" for label in range(len(images))])


@pytest.fixture
def faces(tmp_path):
    for label, count in enumerate([5, 3, 1, 4, 2, 6]):
        (tmp_path / f"faces/{label:04d}").mkdir(parents=True)
        for number in range(count):
            (tmp_path / f"faces/{label:04d}/{number}.jpg").touch()
    return tmp_path / "faces"


def listed(faces, path):
    _, listing = read_listing(path, image_folder=faces)
    return {path: listing.classes[label] for path, label in zip(listing.paths, listing.labels, strict=True)}


def test_held_out_classes_are_not_in_the_training_list(faces, tmp_path):
    split(faces, tmp_path / "out", held_out=0.4)
    train, held_out = (listed(faces, tmp_path / "out" / name) for name in ("train.tsv", "held_out.tsv"))
    assert train | held_out == {f"{one.parent.name}/{one.name}": one.parent.name for one in faces.glob("*/*")}
    classes = [set(found.values()) for found in (train, held_out)]
    assert classes[0].isdisjoint(classes[1])
    assert [len(found) for found in classes] == [4, 2]


@given(sizes.filter(lambda images: len(images) > 1), st.floats(0.01, 0.99), st.integers(-9, 9))
def test_at_least_one_class_is_held_out_and_one_is_left(images, share, seed):
    listing = listing_of(images)
    is_held = held_out_of(listing, share, "class", seed)
    held = np.unique(listing.labels[is_held])
    assert len(held) == min(max(round(share * len(images)), 1), len(images) - 1)
    assert is_held.sum() == sum(images[label] for label in held)


@given(sizes, st.floats(0.01, 0.99), st.integers(-9, 9))
def test_a_share_of_each_class_is_held_out_and_an_image_is_left(images, share, seed):
    listing = listing_of(images)
    try:
        is_held = held_out_of(listing, share, "image", seed)
    except DataError:
        assert all(share * count < 1 or count == 1 for count in images)
        return
    held = np.bincount(listing.labels[is_held], minlength=len(images))
    exact = np.minimum(share * np.array(images), np.array(images) - 1)
    assert (held < np.array(images)).all()
    assert (np.abs(held - exact) < 1 + 1e-9).all()
    if min(images) > 1 and share <= 0.5:  # no class would have all its images held out
        assert abs(is_held.sum() - share * sum(images)) <= 0.5 + 1e-9


@given(sizes, st.randoms(use_true_random=False))
def test_halves_differ_by_an_image_per_class_and_do_not_depend_on_the_order(images, random):
    listing = listing_of(images)
    is_second = halves_of(listing)
    in_second = np.bincount(listing.labels, weights=is_second)
    assert (np.abs(2 * in_second - images) <= 1).all()
    others = listing.labels > 0  # do not depend on the images of the first class
    rest = Listing(
        "", np.array(listing.paths)[others].tolist(), listing.labels[others] - 1, listing.classes[1:]
    )
    assert not others.any() or (halves_of(rest) == is_second[others]).all()
    order = random.sample(range(len(listing.paths)), len(listing.paths))
    moved = Listing("", [listing.paths[i] for i in order], listing.labels[order], listing.classes)
    assert (halves_of(moved) == is_second[order]).all()


@given(sizes, st.integers(0, 9))
def test_pairs_are_distinct_right_and_spread_over_the_classes(images, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(images)), images))
    same, different = draw_pairs(labels, seed)
    possible = np.array([count * (count - 1) // 2 for count in images])
    every = len(labels) * (len(labels) - 1) // 2
    assert len(same) == len(different) == min(possible.sum(), every - possible.sum())
    for pairs, is_same in ((same, True), (different, False)):
        assert len(np.unique(np.sort(pairs, axis=1), axis=0)) == len(pairs)
        assert ((labels[pairs[:, 0]] == labels[pairs[:, 1]]) == is_same).all()
        assert (pairs[:, 0] != pairs[:, 1]).all()


def test_the_tests_are_of_the_held_out_images(faces, tmp_path):
    counts = split(faces, tmp_path / "out", held_out=0.5, seed=1)["counts"]
    held_out = listed(faces, tmp_path / "out/held_out.tsv")
    pairs = read_pair_list(tmp_path / "out/pairs.txt")  # which names the folder of the images
    assert str(pairs.images.root) == str(faces)
    assert len(pairs) == counts["pairs.txt"]["pairs"] >= 10
    assert pairs.is_same.tolist() == [True, False] * (len(pairs) // 2)
    paths = np.array(pairs.images.paths())[pairs.pairs]
    assert [held_out[one] == held_out[other] for one, other in paths] == pairs.is_same.tolist()
    _, listing = read_listing(tmp_path / "out/held_out.tsv", image_folder=faces)
    gallery = {listing.paths[i] for i in np.flatnonzero(split_gallery(listing.labels))}
    assert listed(faces, tmp_path / "out/gallery.tsv") == {path: held_out[path] for path in gallery}
    others = {path: name for path, name in held_out.items() if path not in gallery}
    assert listed(faces, tmp_path / "out/probes.tsv") == others


def test_files_that_the_held_out_images_do_not_suffice_for_are_absent_and_named(faces, tmp_path, capsys):
    words = ["data", "split", str(faces), str(tmp_path / "out"), "--by", "image", "--held_out", "0.2"]
    assert cli.main(words) == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"train.tsv", "held_out.tsv"}
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("pairs.txt", "gallery.tsv"))
    (tmp_path / "a.csv").write_text("path,label\n0000/0.jpg,0\n0000/1.jpg,0\n0001/0.jpg,1\n")
    done = split(tmp_path / "a.csv", tmp_path / "halves", halves=True, image_folder="s3://me:PW@bucket/faces")
    assert done["counts"]["half1.tsv"] == {"images": 2, "classes": 2}


def test_what_cannot_be_split_is_refused_and_writes_nothing(faces, tmp_path):
    for arguments, message in (
        ({"held_out": 1.5}, "share"),
        ({"held_out": -0.5}, "share"),
        ({"by": "image", "held_out": 0.01}, "share"),
    ):
        with pytest.raises(DataError, match=message):
            split(faces, tmp_path / "out", **arguments)
    (tmp_path / "one").mkdir()
    (faces / "0000").rename(tmp_path / "one/0000")
    with pytest.raises(DataError, match="class"):
        split(tmp_path / "one", tmp_path / "out")
    with pytest.raises(DataError, match="already exists"):
        split(faces, tmp_path / "one")
    with pytest.raises(OptionError, match="s3://bucket/out"):
        split(faces, "s3://me:SECRET@bucket/out")
    assert not (tmp_path / "out").exists()
