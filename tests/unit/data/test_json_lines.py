from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.class_names import ClassNames
from plsc.data.files import name_key
from plsc.data.sources.rows import JsonLinesSource
from plsc.errors import DataError, OptionError
from tests.images import NAMES, UNSAFE_NAMES


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / "a.jpg").write_bytes(b"a.jpg")
    return path


GOOD = '{"image": "a.jpg", "label": 4}'


@pytest.mark.parametrize(
    "text",
    [f"{GOOD}\n{GOOD}\n", f"\ufeff{GOOD}\r\n\r\n{GOOD}", f"\n\n {GOOD} \n\n{GOOD}\n\n"],
)
def test_blank_lines_and_line_ends_are_accepted(tmp_path, text):
    source = JsonLinesSource(write(tmp_path, text))
    assert [source[i] for i in range(len(source))] == [(b"a.jpg", 4)] * 2


def test_labels_may_be_names_and_columns_are_chosen_by_name(tmp_path):
    rows = [{"who": name, "file": "x", "photo": "a.jpg"} for name in ("bo", "al", "bo")]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))
    source = JsonLinesSource(path, image_column="photo", label_column="who")
    assert [source[i] for i in range(3)] == [(b"a.jpg", 1), (b"a.jpg", 0), (b"a.jpg", 1)]
    assert source.class_names == ["al", "bo"]
    assert source.name(2) == "train.jsonl:3"
    with pytest.raises(OptionError, match="'gone'; the columns are: who, file, photo"):
        JsonLinesSource(path, label_column="gone")


def test_label_columns_of_similar_names_have_their_own_index(tmp_path):
    row = {"image": "a.jpg", "identity_of_person_v1": 3, "identity_of_person_v2": 4}
    path = write(tmp_path, json.dumps(row))
    found = [
        JsonLinesSource(path, label_column=f"identity_of_person_v{n}").labels().tolist() for n in (1, 2, 1)
    ]
    assert found == [[3], [4], [3]]


def test_an_integer_and_a_string_with_zeros_are_different_classes(tmp_path):
    rows = ({"image": "a.jpg", "label": label} for label in (7, "7", "007"))
    source = JsonLinesSource(write(tmp_path, "\n".join(map(json.dumps, rows))))
    assert (source.labels().tolist(), source.class_names) == ([1, 1, 0], ["007", "7"])


def test_class_names_are_data_and_only_unsafe_ones_are_refused(tmp_path):
    rows = [{"image": "a.jpg", "label": name} for name in NAMES]
    source = JsonLinesSource(write(tmp_path, "\n".join(map(json.dumps, rows))))
    assert source.class_names == sorted(NAMES)
    assert [*ClassNames.of(source.class_names)] == sorted(NAMES)
    for name in UNSAFE_NAMES:
        text = "\n".join(json.dumps(row) for row in [*rows, {"image": "a.jpg", "label": name}])
        with pytest.raises(DataError, match=r"train\.jsonl:8: .*name"):
            JsonLinesSource(write(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSON"),
        ("[1]", "JSON"),
        ("null", "JSON"),
        ('{"image": "a.jpg"}', "'label'"),
        ('{"image": "a.jpg", "label": 1.0}', "'label'"),
        ('{"image": "a.jpg", "label": true}', "'label'"),
        ('{"image": "a.jpg", "label": NaN}', "JSON"),
        ('{"image": "a.jpg", "label": 1, "label": 2}', "twice"),
        ('{"image": "a.jpg", "label": -3}', "'-3'"),
        ('{"image": "a.jpg", "label": ""}', "label"),
        ('{"image": "a.jpg", "label": %s}' % ("9" * 5000), "JSON"),
        ("[" * 100_000, "JSON"),
        (b'{"image": "\xff"}', "JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, message):
    data = line.encode() if isinstance(line, str) else line
    text = GOOD.encode() + b"\n\n" + data + b"\n" + GOOD.encode()
    with pytest.raises(DataError, match=r"train\.jsonl:3: ") as caught:
        JsonLinesSource(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_file_without_samples_and_an_image_that_is_not_a_string_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"train\.jsonl is empty"):
        JsonLinesSource(write(tmp_path, "\n\n"))
    source = JsonLinesSource(write(tmp_path, f'{GOOD}\n{{"image": 3, "label": 1}}'))
    with pytest.raises(DataError, match=r"train\.jsonl:2: 'image'"):
        source[1]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40)
@given(st.lists(values, max_size=5))
def test_every_label_is_read_or_refused(tmp_path_factory, labels):
    folder = tmp_path_factory.mktemp("json")
    rows = [{"image": "a.jpg", "label": label} for label in [0, *labels]]
    path = write(folder, "\n".join(map(json.dumps, rows)))
    are_ids = all(type(label) is int and 0 <= label < 10**18 for label in labels)
    try:
        source = JsonLinesSource(path)
    except DataError:
        assert not are_ids
    else:
        names = source.class_names
        found = [str(label) if names is None else names[label] for label in source.labels()]
        expected = [str(row["label"]).strip() for row in rows]
        assert list(map(name_key, found)) == list(map(name_key, expected))
