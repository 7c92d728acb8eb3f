import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from plsc.clean.review import Part, Row, write_page
from plsc.data.sources import TorchDatasetSource, open_source
from plsc.errors import DataError

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
        assert all(value.startswith("#part-") for name, value in attributes if name == "href")
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
    assert sum(SHOWN in one for one in pages[1].texts) == 8  # both titles are there twice


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
    source = TorchDatasetSource([(np.zeros((8, 8, 3), np.uint8), 0)] * 14)
    write_page(tmp_path / "page.html", "", [], parts_of(source, "caption", 1312))
    page = Parsed(tmp_path / "page.html")
    assert page.tags.count("article") == 100
    assert len(page.images) == 1200
    for text in ("1,312", "The 100 surest of 1,312; all are in changes.tsv.", "98 %", "No proposals."):
        assert text in page.texts
    assert "caption (and 2 more)" in page.texts


def test_a_page_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(DataError, match="cannot write"):
        write_page(tmp_path / "gone/page.html", "", [], [])
