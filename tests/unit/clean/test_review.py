"""Proposals that contradict each other: the file of changes never does."""

import base64
import io
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plsc.clean.changes import read_changes, write_changes
from plsc.clean.faults import Found
from plsc.clean.review import Part, Proposals, Row, open_images, write_page
from plsc.data.sources import TorchDatasetSource, open_source

CLASSES = ["a", "a_2", "b", "b_3", "c", "d"]
LABELS = np.repeat(np.arange(6), 3)
ROWS, KEPT = len(LABELS), np.ones(len(LABELS), bool)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("faces")
    for name in CLASSES:
        (root / name).mkdir()
        for number in range(3):
            Image.effect_noise((8, 8), 50).save(root / name / f"{number}.jpg")
    paths = sorted(map(str, root.rglob("*.jpg")))
    columns = {"names": np.array(paths), "labels": LABELS, "embeddings": np.eye(ROWS)}
    return open_images(root, [type("Embeddings", (dict,), {"folder": root})(columns)])


def found(*subjects, width=1):
    numbers = np.array(subjects, np.int64).reshape(-1, width)
    return Found(np.linspace(1, 0.5, len(numbers)), numbers)


def pairs(*subjects):
    return found(*subjects, width=2)


def described(proposals):
    return {(one.change, one.image or one.of, one.to) for one in proposals.changes.values()}


@st.composite
def several(draw, most, width):
    """Subjects of distinct numbers, each subject once."""
    numbers = st.lists(st.integers(0, most - 1), min_size=width, max_size=width, unique=True).map(sorted)
    return found(*draw(st.lists(numbers, max_size=8, unique_by=tuple)), width=width)


@settings(max_examples=50)
@given(
    several(ROWS, 2),
    several(6, 2),
    several(ROWS, 1),
    st.lists(st.floats(0, 1), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(1, 5), min_size=ROWS, max_size=ROWS),
)
def test_apply_accepts_what_clean_proposes(images, tmp_path_factory, doubled, same, wrong, scores, steps):
    proposals, scores = Proposals(images), np.array(scores)
    proposals.duplicates(doubled, scores)
    proposals.same(same, KEPT)
    proposals.wrong(wrong, (LABELS + np.array(steps)) % 6, scores[wrong.subjects[:, 0]], KEPT)
    folder = tmp_path_factory.mktemp("changes")
    write_changes(folder / "changes.tsv", proposals.changes.values())
    written = [replace(one, score=0, reason="") for one in proposals.changes.values()]
    assert read_changes(folder / "changes.tsv", images.listing)[0] == written


def test_of_images_that_are_the_same_one_is_left_and_the_likely_wrong_one_is_removed(images):
    scores = np.zeros(ROWS)
    scores[0] = 1  # its label is the most likely to be wrong
    for order in (((0, 1), (1, 3), (0, 3)), ((0, 3), (0, 1), (1, 3)), ((1, 3), (0, 3), (0, 1))):
        proposals = Proposals(images)
        proposals.duplicates(pairs(*order), scores)
        assert len(proposals.changes) == 2
    for wrong, gone in ((scores, "a/0.jpg"), (np.roll(scores, 3), "a_2/0.jpg")):
        proposals = Proposals(images)
        assert proposals.duplicates(pairs((0, 3)), wrong).total == 1
        assert described(proposals) == {("remove", gone, "")}


def test_merges_end_in_the_largest_class(images):
    proposals = Proposals(images)
    proposals.same(pairs((0, 1), (1, 2), (0, 2), (4, 5)), KEPT)
    assert described(proposals) == {("merge", "a_2", "a"), ("merge", "b", "a_2"), ("merge", "d", "c")}


def test_an_image_is_moved_only_if_its_class_is_sure(images):
    proposals, likely = Proposals(images), np.zeros(ROWS, int)
    likely[[12, 15]] = [1, 4]
    proposals.wrong(found(12, 15), likely, np.array([1, 0.4]), KEPT)
    assert described(proposals) == {("move", "c/0.jpg", "a_2"), ("remove", "d/0.jpg", "")}


def test_what_is_not_sure_is_shown_and_changes_nothing(images):
    proposals, unsure = Proposals(images), np.full(1, 0.49)
    parts = [
        proposals.same(Found(unsure, np.array([[0, 1]])), KEPT),
        proposals.wrong(Found(unsure, np.array([[4]])), LABELS[::-1], np.ones(1), KEPT),
    ]
    assert not proposals.changes
    assert [(part.total, len(part.proposals)) for part in parts] == [(0, 1)] * 2
    questions = {(one.change, one.image or one.of, one.score) for one in proposals.questions.values()}
    assert questions == {("merge", "a_2", 0), ("move", "a_2/1.jpg", 0)}


HOSTILE = "<img src=x onerror=alert(1)>\"'&\u202e\n"
SHOWN = "<img src=x onerror=alert(1)>\"'&\\u202e\\n"


class Parsed(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.texts, self.tags, self.images = [], [], []
        self.attributes = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.update((tag, name) for name, _ in attributes)
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_data(self, data):
        self.texts.append(data)


def parts_of(source, text, proposals=1):
    rows = [Row(text, source, np.arange(len(source)))]
    return [Part(text, text, [(0.98, text, rows)] * proposals), Part("Empty", "")]


def test_names_and_strings_are_shown_as_text(tmp_path):
    pages = []
    for name, text in (("plain", "text"), (HOSTILE.replace("\n", ""), HOSTILE)):
        folder = tmp_path / name
        folder.mkdir()
        Image.new("RGB", (32, 20), (9, 99, 199)).save(folder / f"{name}.png")
        (folder / "label.txt").write_text(f"{name}.png\t0\n", encoding="utf-8")
        write_page(tmp_path / "page.html", text, [text], parts_of(open_source(folder), text))
        pages.append(Parsed(tmp_path / "page.html"))
    assert pages[0].tags == pages[1].tags
    assert pages[0].attributes == pages[1].attributes
    assert pages[1].images[0]["alt"] == SHOWN.removesuffix("\\n") + ".png (label.txt:1)"
    assert sum(SHOWN in one for one in pages[1].texts) == 7  # the title is there twice
    url = "https://host/7.png?sig=SECRET"
    write_page(tmp_path / "page.html", url, [url], parts_of(open_source(folder), url))
    assert "SECRET" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_pictures_are_small_and_in_the_file_and_a_broken_one_is_named(tmp_path):
    sizes = {"tiny": (32, 20), "photo": (300, 600), "line": (900, 2)}
    for name, size in sizes.items():
        Image.new("RGB", size, (9, 99, 199)).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    lines = [f"{name}.png\t0\n" for name in (*sizes, "broken")]
    (tmp_path / "label.txt").write_text("".join(lines))
    write_page(tmp_path / "page.html", "", [], parts_of(open_source(tmp_path), ""))
    page = Parsed(tmp_path / "page.html")
    data = [base64.b64decode(one["src"].removeprefix("data:image/jpeg;base64,")) for one in page.images]
    assert [Image.open(io.BytesIO(one)).size for one in data] == [(96, 60), (48, 96), (96, 1)]
    assert "broken.png (label.txt:4)" in page.texts[page.texts.index("cannot be decoded") + 1]


def test_the_surest_proposals_are_shown_and_all_are_counted(tmp_path):
    source = TorchDatasetSource([(np.zeros((8, 8, 3), np.uint8), 0)] * 12)
    write_page(tmp_path / "page.html", "", [], parts_of(source, "caption", 1312))
    page = Parsed(tmp_path / "page.html")
    assert page.tags.count("article") == 100
    assert len(page.images) == 1200
    assert "98 %" in page.texts
    assert any("of 1,312" in text for text in page.texts)
