"""Faults that are planted into synthetic embeddings: noisy copies of a centre per class."""

import io

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter

from plsc.clean import faults
from plsc.clean.faults import (
    Labels,
    View,
    agreeing,
    compare_labels,
    find_duplicates,
    neighbours,
    planted_copies,
    read_pixels,
    same_classes,
    shared_classes,
    sure_of_class,
    wrong_labels,
)
from plsc.data.sources import open_source
from plsc.errors import DataError
from plsc.gallery import gallery as vectors
from plsc.gallery.gallery import nearest


def embed(truth, noise=1.0, seed=0, size=32):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((truth.max() + 1, size))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    found = centres[truth] + noise / np.sqrt(size) * rng.standard_normal((len(truth), size))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def one_view(unit):
    return [View(unit, np.ones(len(unit), bool))]


def flipped(truth, share, seed):
    """Return labels of which a share is a random other class."""
    rng = np.random.default_rng(seed)
    labels, classes = truth.copy(), truth.max() + 1
    rows = rng.choice(len(truth), round(share * len(truth)), replace=False)
    labels[rows] = (truth[rows] + rng.integers(1, classes, len(rows))) % classes
    return labels


def find(views, labels):
    """Return what `plsc data clean` finds: wrong labels, classes that are one."""
    classes, kept = labels.max() + 1, np.ones(len(labels), bool)
    wrong = wrong_labels(compare_labels(views, labels, kept, classes))
    kept[proposed(wrong)[:, 0]] = False
    return wrong, same_classes(views, labels, kept, classes)


TRUTH = np.repeat(np.arange(100), 12)


def of_scores(scores, rng):
    """Return what `compare_labels` would, for these scores; random labels have scores of about 7."""
    random = np.abs(scores) / 2 - rng.normal(7, 1, len(scores))
    nothing = np.zeros(len(scores), int)
    return Labels(-scores / 2, scores / 2, nothing, scores, random, [])


@pytest.mark.parametrize("true", [0, 6, 30, 300])
def test_sure_proposals_are_right(true):
    right = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        scores = np.concatenate([rng.exponential(0.5, 3000) - 2, rng.normal(6, 1, true)])
        found = wrong_labels(of_scores(scores, rng))
        assert (np.diff(found.sure) <= 0).all()
        right += (found.subjects[found.sure >= 0.9, 0] >= 3000).tolist()
    assert len(right) >= 5 * true  # half of them
    assert np.sum(right) >= 0.85 * len(right) - 3  # of 30,000 images, few are far out by chance


def test_a_network_that_tells_classes_weakly_proposes_little():
    rng = np.random.default_rng(0)
    sure = wrong_labels(of_scores(rng.exponential(0.5, 3000) - 4, rng))
    assert not len(proposed(sure))
    weak = wrong_labels(of_scores(rng.exponential(0.5, 3000) - 0.5, rng))
    assert len(proposed(weak)) <= 9  # 0.3 %
    assert len(weak.subjects) >= faults.SHOWN  # the most suspicious


def proposed(found):
    return found.subjects[found.sure >= faults.LEAST_SURE]


def test_few_wrong_labels_among_weakly_told_classes_are_the_first_that_are_shown():
    truth = np.repeat(np.arange(120), 20)
    for seed in range(3):
        labels, rng = truth.copy(), np.random.default_rng(seed)
        rows = rng.choice(len(truth), 20, replace=False)
        labels[rows] = (labels[rows] + rng.integers(1, 120, 20)) % 120
        views = one_view(embed(truth, 1.4, seed))
        found = compare_labels(views, labels, np.ones(len(labels), bool), 120)
        assert 0.6 < np.mean(found.scores() <= 0) < 0.95
        wrong = wrong_labels(found)
        assert np.isin(rows, wrong.subjects[:20, 0]).sum() >= 12
        assert np.isin(rows, wrong.subjects[:100, 0]).sum() >= 18


def test_shared_classes_are_found_by_the_distance_of_different_classes():
    one, other = np.repeat(np.arange(120), 12), np.repeat(np.arange(60, 180), 12)
    unit, apart = embed(np.concatenate([one, other]), 1.4), np.concatenate([one, other + 60])
    shared = proposed(shared_classes(unit, apart, 240, 120))
    right = shared[:, 0] == shared[:, 1] - 60
    assert right.mean() >= 0.9
    assert right.sum() >= 54
    assert len(proposed(shared_classes(embed(apart, 1.4), apart, 240, 120))) <= 4


@pytest.mark.parametrize("noise", [0.7, 1.2])
def test_nothing_is_proposed_for_a_dataset_without_faults(noise):
    wrong, same = find(one_view(embed(TRUTH, noise)), TRUTH)
    assert [len(proposed(one)) for one in (wrong, same)] == [0, 0]


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_wrong_labels_and_their_right_classes_are_found(share):
    views, labels = one_view(embed(TRUTH)), flipped(TRUTH, share, seed=1)
    kept = np.ones(len(labels), bool)
    wrong = wrong_labels(compare_labels(views, labels, kept, 100))
    rows, is_wrong = proposed(wrong)[:, 0], labels != TRUTH
    assert is_wrong[rows].mean() > 0.9
    assert np.isin(np.flatnonzero(is_wrong), rows).mean() > 0.9
    kept[rows] = False
    again = compare_labels(views, labels, kept, 100)
    assert (again.likely == TRUTH)[rows[is_wrong[rows]]].mean() > 0.9


def test_the_probability_of_the_likely_class_is_its_accuracy():
    predicted, right = [], []
    for seed in range(5):
        views, labels = one_view(embed(TRUTH, 1.4, seed)), flipped(TRUTH, 0.1, seed)
        kept, images = labels == TRUTH, np.flatnonzero(labels != TRUTH)
        found = compare_labels(views, labels, kept, 100)
        predicted.append(sure_of_class(found, kept, images))
        right.append(found.likely[images] == TRUTH[images])
    predicted, right = np.concatenate(predicted), np.concatenate(right)
    for some in (predicted < 0.6, (predicted >= 0.6) & (predicted < 0.9), predicted >= 0.9):
        assert some.sum() > 50
        assert right[some].mean() == pytest.approx(predicted[some].mean(), abs=0.1)


def test_images_alone_in_their_class_are_not_judged_and_hide_no_wrong_labels():
    views, labels = one_view(embed(TRUTH)), flipped(TRUTH, 0.05, seed=2)
    alone = np.flatnonzero(labels == TRUTH)[::7]
    labels[alone] = 100 + np.arange(len(alone))
    found = compare_labels(views, labels, np.ones(len(labels), bool), labels.max() + 1)
    assert np.isnan(found.own[alone]).all()
    wrong = proposed(wrong_labels(found))[:, 0]
    is_wrong = (labels != TRUTH) & (labels < 100)
    assert not np.isin(alone, wrong).any()
    assert np.isin(np.flatnonzero(is_wrong), wrong).mean() > 0.9


def test_two_classes_that_are_one_are_asked_about_first():
    pairs = 40
    labels = np.where((pairs > TRUTH) & (np.arange(len(TRUTH)) % 2 == 1), 100 + TRUTH, TRUTH)
    same = find(one_view(embed(TRUTH)), labels)[1]
    assert not same.sure.any()  # classes that look the same are no evidence
    first, second = same.subjects.T
    assert np.mean(second == first + 100) > 0.85
    assert len(same.subjects) > 0.85 * pairs


def test_a_network_does_not_judge_the_images_that_it_has_learned():
    labels, is_second = flipped(TRUTH, 0.1, seed=4), np.arange(len(TRUTH)) % 2 == 1
    learned = embed(labels, 0.1)  # all labels look right
    views = [
        View(np.where(~judged[:, None], learned, embed(TRUTH)), judged) for judged in (is_second, ~is_second)
    ]
    is_wrong = labels != TRUTH
    wrong = proposed(find(views, labels)[0])[:, 0]
    assert is_wrong[wrong].mean() > 0.9
    assert np.isin(np.flatnonzero(is_wrong), wrong).mean() > 0.9
    everything = np.ones(len(labels), bool)  # the test would notice
    assert len(proposed(wrong_labels(compare_labels(one_view(learned), labels, everything, 100)))) == 0


def test_inverted_lists_find_the_share_of_an_exact_search_that_is_asked_for(monkeypatch):
    unit = embed(np.repeat(np.arange(300), 10), 1.5)
    cosines = unit @ unit.T
    exact = np.argsort(-cosines, 1)[:, :6]
    monkeypatch.setattr(vectors, "_EXACT", 100)
    for least in (0.1, 0.98):
        monkeypatch.setattr(vectors, "RECALL", least)
        numbers = nearest(unit, unit, 6)
        true = np.mean([np.isin(one, two).mean() for one, two in zip(exact, numbers, strict=True)])
        assert true >= least - 0.02
        assert (least < 0.5) == (true < 0.96)


@pytest.mark.parametrize("is_right", [True, False])
def test_neighbours_are_those_of_an_exact_search_whatever_the_lists(is_right):
    labels = np.repeat(np.arange(100), [1, 4, 7, 28] * 25)
    unit = embed(labels)
    lists = np.stack([labels, (labels + 1) % 100], 1)
    if not is_right:
        lists = np.random.default_rng(0).permutation(lists)
    cosines = unit @ unit.T
    numbers = neighbours(unit, lists, 3)
    true = np.mean(
        [np.isin(a, b).mean() for a, b in zip(np.argsort(-cosines, 1)[:, :3], numbers, strict=True)]
    )
    assert true >= 0.96
    assert (numbers[:, 0] == np.arange(len(labels))).all()


def test_a_row_is_repeated_if_the_inverted_lists_have_too_few(monkeypatch):
    monkeypatch.setattr(vectors, "_EXACT", 10)
    monkeypatch.setattr(vectors, "RECALL", 0.0)
    monkeypatch.setattr(vectors, "SAMPLE", 1)
    unit = embed(np.arange(400))
    numbers = nearest(unit, unit, 100)
    assert numbers.min() >= 0
    assert (numbers == numbers[:, :1])[:, 1:].any()


@pytest.mark.parametrize(
    "labels",
    [
        np.zeros(1, int), np.zeros(9, int), np.zeros(1000, int), np.arange(9),
        np.repeat(np.arange(3), [1, 2, 700]), np.repeat(np.arange(2), 4),
    ],
)  # fmt: skip
def test_unusual_datasets_have_no_faults(labels):
    wrong, same = find(one_view(embed(labels, 0.5)), labels)
    assert [len(proposed(one)) for one in (wrong, same)] == [0, 0]


# Duplicates among drawn pictures: some shapes and colours per picture, as of one family.


COUNT = 30


def draw(seed, size=160):
    """Return a picture of a face-like shape, each with its own places and colours."""
    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", (size, size), tuple(rng.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = rng.integers(-10, size - 10, 2).tolist()
        wide, high = rng.integers(10, size // 2, 2).tolist()
        pen.ellipse((x, y, x + wide, y + high), tuple(rng.integers(0, 256, 3).tolist()))
    return picture.filter(ImageFilter.GaussianBlur(1))


def jpeg(picture, quality=70):
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file)


CHANGES = {
    "shifted": lambda picture: ImageChops.offset(picture, 1, 0),
    "saved": jpeg,
    "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.05),
    "smaller": lambda picture: picture.resize((100, 100)),
}


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a folder of named pictures or bytes, with pixels and copies."""

    def opened(images):
        for name, image in images.items():
            if isinstance(image, bytes):
                (tmp_path / name).write_bytes(image)
            else:
                image.save(tmp_path / name)
        lines = [f"{name} {number}\n" for number, name in enumerate(images)]
        (tmp_path / "label.txt").write_text("".join(lines))
        source, rows = open_source(tmp_path), np.arange(len(images))
        pixels = read_pixels(source, rows)
        return source, pixels, planted_copies(source, rows, pixels)

    return opened


def all_pairs(count):
    return np.stack(np.triu_indices(count, 1), 1)


def test_copies_are_found_and_other_pictures_are_not(opened):
    pictures = {f"{number}.png": draw(number) for number in range(COUNT)}
    changed = {f"{name}.png": change(draw(number)) for number, (name, change) in enumerate(CHANGES.items())}
    _, pixels, copies = opened({**pictures, **changed})
    found = agreeing(pixels, pixels, all_pairs(COUNT + len(CHANGES)), copies)
    near = {(number, COUNT + number) for number in range(len(CHANGES))}
    assert {tuple(pair) for pair in found.subjects.tolist()} == near
    assert (np.diff(found.sure) <= 0).all()


def test_the_same_file_is_certain_and_pairs_come_from_neighbours_and_files(opened):
    pictures = {f"{number}.png": draw(number) for number in range(4)}
    file = io.BytesIO()
    draw(0).save(file, "PNG")
    _, pixels, copies = opened({**pictures, "same.png": file.getvalue(), "near.png": jpeg(draw(1), 90)})
    far = np.arange(6)[:, None]  # the nearest images by two networks
    close = np.array([[0, 1], [1, 5], [2, 1], [3, 1], [4, 1], [5, 1]])
    found = find_duplicates([far, close], pixels, copies)
    assert (found.subjects[0].tolist(), found.sure[0]) == ([0, 4], 1)
    assert found.subjects[1].tolist() == [1, 5]
    assert len(found.sure) == 2


def test_an_image_that_cannot_be_decoded_is_named(opened):
    with pytest.raises(DataError, match=r"^bad.png \(label.txt:1\): "):
        opened({"bad.png": b"no image", "good.png": draw(0)})


def test_pictures_of_one_colour_are_duplicates_only_as_files(opened):
    gray = [Image.new("RGB", (20, 20), (level,) * 3) for level in (0, 128, 128, 255)]
    images = {f"{number}.png": one for number, one in enumerate(gray)}
    images |= {"jpeg.jpg": gray[1], "drawn.png": draw(0)}
    source, pixels, copies = opened(images)
    assert agreeing(pixels, pixels, all_pairs(6), copies).subjects.tolist() == [[1, 2]]
    copies = planted_copies(source, np.arange(5), read_pixels(source, np.arange(5)))  # no other ones
    assert agreeing(pixels, pixels, all_pairs(5), copies).subjects.tolist() == [[1, 2]]
