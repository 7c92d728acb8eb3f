import csv
import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc import cli
from plsc.clean.changes import Change, apply_changes, read_changes, write_changes
from plsc.data.lists import read_listing
from plsc.errors import DataError
from tests.images import UNSAFE_NAMES

CLASSES = "abcdef"
IMAGES = [f"{name}/{number}.jpg" for name in CLASSES for number in range(3)]
HEADER = "change\tscore\timage\tclass\tto\treason\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("faces")
    for path in IMAGES:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).touch()
    return root


@pytest.fixture(scope="module")
def listing(data):
    return read_listing(data)[1]


@pytest.fixture
def read(listing, tmp_path):
    def read(text):
        (tmp_path / "changes.tsv").write_text(text, newline="")
        return read_changes(tmp_path / "changes.tsv", listing)[0]

    return read


def applied(data, folder, changes):
    """Return class by path of the list, and new by old class name."""
    write_changes(folder / "changes.tsv", changes)
    apply_changes(data, folder / "changes.tsv", folder / "out")
    _, after = read_listing(folder / "out/list.tsv", image_folder=data)
    classes = (folder / "out/classes.tsv").read_text(encoding="utf-8")
    found = {path: after.classes[label] for path, label in zip(after.paths, after.labels, strict=True)}
    return found, dict(csv.reader(io.StringIO(classes), delimiter="\t"))


def test_what_is_written_or_saved_by_a_spreadsheet_program_is_read_back(read, listing, tmp_path):
    changes = [
        Change("move", 0.9137, "a/0.jpg", "a", "new class", 'nearest "b", by 0.2'),
        Change("remove", 0.5, "", "b", reason="blurred"),
        Change("merge", 0.25, "", "c", "d", "same person"),
    ]
    write_changes(tmp_path / "changes.tsv", changes)
    assert (tmp_path / "changes.tsv").read_text().startswith(HEADER)
    found, *_ = read_changes(tmp_path / "changes.tsv", listing)
    assert found == [replace(one, score=0, reason="") for one in changes]
    text = '\ufeffto\t Class\timage\tchange\r\n\r\nb\ta\t"a/0.jpg"\tmove\r\n\t\t\t\r\n\ta\ta/1.jpg\tremove'
    found = [(one.change, one.image, one.of, one.to) for one in read(text)]
    assert found == [("move", "a/0.jpg", "a", "b"), ("remove", "a/1.jpg", "a", "")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["move\t1\ta/9.jpg\ta\tb"], "2: .*'a/9.jpg'"),
        (["move\t1\ta/0.jpg\tx\tb"], "2: .*'x'"),
        (["", "move\t1\ta/0.jpg\tb\tc"], "3: .*'b'"),
        (["mvoe\t1\ta/0.jpg\ta\tb"], "2: 'mvoe'"),
        (["move\t1\ta/0.jpg\ta"], "2: 'move'"),
        (['move\t1\ta/0.jpg\ta\t"x\ty"'], r"2: 'x\\ty'"),
        (["remove\t1\ta/0.jpg\ta\tb"], "2: 'remove'"),
        (["merge\t1\ta/0.jpg\ta\tb"], "2: 'merge'"),
        (["merge\t1\t\ta\ta"], "2: .*circle"),
        (["merge\t1\t\ta\tb", "merge\t1\t\ta\tc"], "3: line 2"),
        (["move\t1\ta/0.jpg\ta\tb", "remove\t1\ta/0.jpg\ta"], "3: line 2"),
        (["remove\t1\t\tb", "move\t1\ta/0.jpg\ta\tb"], "3: line 2"),
        (["merge\t1\t\ta\tb", "remove\t1\t\tb"], "2: line 3"),
        (
            [f"merge\t1\t\t{one}\t{other}" for one, other in ("ab", "ec", "bc", "cd", "db")],
            r"4: .*\[4, 5, 6\]",
        ),
        (['move\t1\ta/0.jpg\t"a"x\tb'], "2: "),
    ],
)
def test_a_problem_is_reported_with_its_line(read, lines, message):
    with pytest.raises(DataError, match=rf"changes\.tsv:{message}"):
        read(HEADER + "\n".join(lines))


def test_a_file_that_cannot_be_read_or_lacks_a_column_is_reported(read, listing, tmp_path):
    for header in ("", "change\timage\tclass\n", "change,image,class,to\n"):
        with pytest.raises(DataError, match=r"changes\.tsv:1: "):
            read(header)
    (tmp_path / "changes.tsv").write_bytes(HEADER.encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        read_changes(tmp_path / "changes.tsv", listing)
    with (tmp_path / "changes.tsv").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(DataError, match="at most 268435456"):
        read_changes(tmp_path / "changes.tsv", listing)


@st.composite
def possible_changes(draw):
    """Changes that do not contradict each other."""
    removed = draw(st.sets(st.sampled_from(CLASSES), max_size=2))
    left = [name for name in CLASSES if name not in removed]
    merged = draw(st.dictionaries(st.sampled_from(left[1:]), st.integers(0, 9)))
    changes = [Change("remove", 1, "", name) for name in removed]
    # Into a class before it, so that there is no circle
    changes += [
        Change("merge", 1, "", name, left[number % left.index(name)]) for name, number in merged.items()
    ]
    images = draw(st.dictionaries(st.sampled_from(IMAGES), st.sampled_from([*left, "x", ""])))
    changes += [Change("move" if to else "remove", 1, path, path[0], to) for path, to in images.items()]
    return draw(st.permutations(changes))


@settings(max_examples=40)
@given(possible_changes())
def test_each_image_is_where_its_changes_lead(data, tmp_path_factory, changes):
    by_image = {one.image: one for one in changes if one.image}
    by_class = {one.of: one for one in changes if not one.image}

    def expected(path):
        if path in by_image and by_image[path].change == "remove":
            return ""
        name = by_image[path].to if path in by_image else path[0]
        while name in by_class and name:
            name = by_class[name].to
        return name

    wanted = {path: name for path in IMAGES if (name := expected(path))}
    folder = tmp_path_factory.mktemp("applied")
    if not wanted:
        with pytest.raises(DataError, match="removes all images"):
            applied(data, folder, changes)
        return
    images, classes = applied(data, folder, changes)
    assert images == wanted
    for old, new in classes.items():
        while old in by_class:
            old = by_class[old].to
        assert new == (old if old in wanted.values() else "")


def test_the_command_writes_a_new_folder_and_changes_nothing_else(data, tmp_path, capsys):
    before = sorted(data.rglob("*"))
    changes = tmp_path / "changes.tsv"
    edited = [("merge", "", "a", "b"), ("remove", "c/0.jpg", "c", ""), ("move", "c/1.jpg", "c", "bb")]
    write_changes(changes, [Change(kind, 1, *names) for kind, *names in edited])
    words = ["data", "apply", str(data), str(changes), str(tmp_path / "out")]
    text = changes.read_text(encoding="utf-8")
    for name in UNSAFE_NAMES[1:6]:
        changes.write_text(text.replace("\tbb", f"\t{name}"), encoding="utf-8")
        assert cli.main(words) == 1
        assert repr(name)[1:-1] in (shown := capsys.readouterr().err)
        assert name not in shown
    changes.write_text(text, encoding="utf-8")
    assert cli.main(words) == 0
    assert sorted(data.rglob("*")) == before
    printed = capsys.readouterr().out
    assert "17 of 18 images, 6 classes (6 before), by 1 moves, 1 removals and 1 merges\n" in printed
    assert "1 new classes: bb\n" in printed
    assert f"plsc train --data.dataset_dir {tmp_path}/out/list.tsv --data.format_arguments " in printed
    assert cli.main(words) == 1
    assert "already exists" in capsys.readouterr().err
