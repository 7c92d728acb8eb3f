import numpy as np
import pytest

from plsc.errors import DataError
from plsc.evaluate import template_files
from plsc.evaluate.template_files import read_protocol

IMAGES = "1.jpg 7 100\n2.jpg 7 100\na b/3.jpg 7 101\n4.jpg 2 5\n5.jpg 30 5\n6.jpg 31 6\n"
PAIRS = "7 2 0\n30 7 1\n2 31 1\n"
HEADER = "TEMPLATE_ID,SUBJECT_ID,FILENAME,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT\n"
FILES = {
    "ijbc_face_tid_mid.txt": IMAGES,
    "ijbc_template_pair_label.txt": PAIRS,
    "ijbc_1N_gallery_G1.csv": HEADER + "7,40,img/1.jpg,1,2,3,4\n7,40,img/2.jpg,1,2,3,4\n",
    "ijbc_1N_gallery_G2.csv": HEADER + '2,41,"img/a,b.jpg",1,2,3,4\n',
    "ijbc_1N_probe_mixed.csv": HEADER + "30,40,img/5.jpg,1,2,3,4\n31,41,img/6.jpg,1,2,3,4\n",
}


def write(folder, **changes):
    """Write the meta files; a change names a part of the file name. None: no such file."""
    for name, text in FILES.items():
        for part, changed in changes.items():
            text = changed if part in name else text
        if text is not None:
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_published_layout(tmp_path):
    found = read_protocol(write(tmp_path))
    assert found.name == "ijbc"
    assert found.template_ids.tolist() == [2, 7, 30, 31]
    assert found.templates.tolist() == [1, 1, 1, 0, 2, 3]
    assert found.media.tolist() == [100, 100, 101, 5, 5, 6]
    assert [found.images.listed(index) for index in range(6)][1:4] == ["2.jpg", "a b/3.jpg", "4.jpg"]
    assert found.images.path(0) == tmp_path / "1.jpg"
    assert found.pairs.tolist() == [[1, 0], [2, 1], [0, 3]]
    assert found.is_same.tolist() == [False, True, True]
    assert sorted(found.galleries) == ["G1", "G2"]
    assert found.galleries["G1"].templates.tolist() == [1]
    assert found.galleries["G1"].subjects.tolist() == [40]
    assert found.probes.templates.tolist() == [2, 3]
    assert found.probes.subjects.tolist() == [40, 41]
    assert found.weights is None


def test_bom_crlf_tabs_and_a_missing_last_newline_are_accepted(tmp_path):
    windows = {
        "tid": b"\xef\xbb\xbf" + IMAGES.replace("\n", "\r\n").replace(" 7 ", "\t7\t").encode(),
        "pair": PAIRS.replace("\n", "\r\n").replace(" ", "\t").rstrip(),
        "G1": b"\xef\xbb\xbf" + FILES["ijbc_1N_gallery_G1.csv"].replace("\n", "\r\n").encode(),
    }
    found = read_protocol(write(tmp_path, **windows))
    assert found.templates.tolist() == [1, 1, 1, 0, 2, 3]
    assert found.pairs.tolist() == [[1, 0], [2, 1], [0, 3]]
    assert found.galleries["G1"].subjects.tolist() == [40]


def test_images_at_urls_need_an_allowed_prefix(tmp_path):
    write(tmp_path, tid=IMAGES.replace("1.jpg", "s3://faces/1.jpg", 1))
    with pytest.raises(DataError, match="allowed"):
        read_protocol(tmp_path)
    assert read_protocol(tmp_path, allowed=["s3://faces/"]).images.path(0) == "s3://faces/1.jpg"


def test_long_pair_files_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(template_files, "_BLOCK_BYTES", 64)
    rng = np.random.default_rng(0)
    pairs = np.array([2, 7, 30, 31])[rng.integers(0, 4, (300, 2))]
    flags = rng.integers(0, 2, 300)
    lines = [f"{one} {other} {flag}\n" for (one, other), flag in zip(pairs, flags, strict=True)]
    found = read_protocol(write(tmp_path, pair="".join(lines)))
    assert found.template_ids[found.pairs].tolist() == pairs.tolist()
    assert found.is_same.tolist() == (flags == 1).tolist()
    lines[200] = "7 2\n"
    write(tmp_path, pair="".join(lines))
    with pytest.raises(DataError, match=r"label\.txt: .*#201.*7 2;"):
        read_protocol(tmp_path)


def test_only_one_of_the_protocols_is_needed(tmp_path):
    found = read_protocol(write(tmp_path, pair=None))
    assert found.pairs is None
    (tmp_path / "other").mkdir()
    found = read_protocol(write(tmp_path / "other", gallery=None, probe=None))
    assert (found.galleries, found.probes) == ({}, None)


def test_scores_of_the_detector_are_weights(tmp_path):
    lines = [line.rsplit(" ", 2)[0] for line in IMAGES.splitlines()]
    scores = tmp_path / "ijbc_name_5pts_score.txt"
    scores.write_text("".join(f"{name} {'1.5 ' * 10}0.{i}\n" for i, name in enumerate(lines)))
    assert read_protocol(write(tmp_path)).weights.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    scores.write_text("".join(f"{name} 0.5\n" for name in lines[::-1]))
    with pytest.raises(DataError, match=r"score\.txt:1: .*'6\.jpg 0\.5'"):
        read_protocol(tmp_path)
    scores.write_text(f"{lines[0]} 0.5\n")
    with pytest.raises(DataError, match=r"has 1 lines for 6 images"):
        read_protocol(tmp_path)
    scores.write_text(f"{lines[0]} nan\n")
    with pytest.raises(DataError, match=r"score\.txt:1: .*'1\.jpg nan'"):
        read_protocol(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tid": None}, "needs one file <dataset>_face_tid_mid.txt, .* found none"),
        ({"tid": ""}, "lists no images"),
        ({"tid": "1.jpg 7 100\n2.jpg 7\n"}, r"mid\.txt:2: expected '<image>"),
        ({"tid": "1.jpg -7 100\n"}, r"mid\.txt:1: .*'1.jpg -7 100'"),
        ({"tid": "1.jpg 7 1.0\n"}, r"mid\.txt:1: "),
        ({"tid": "1.jpg " + "9" * 30 + " 1\n"}, r"mid\.txt:1: "),
        ({"tid": "../1.jpg 7 100\n"}, r"mid\.txt:1: .*the location '\.\./1\.jpg' is outside"),
        ({"tid": "http://host/1.jpg 7 100\n"}, r"mid\.txt:1: .* argument `allowed`"),
        ({"pair": "1" * 20000}, r"label\.txt: "),
        ({"tid": "x" * 20000 + " 7 100\n"}, r"mid\.txt:1 is longer than 16384 bytes"),
        ({"pair": None, "gallery": None, "probe": None}, "has neither ijbc_template_pair_label.txt for 1:1"),
        ({"pair": "7 2 1\n"}, "needs pairs of the same and of different subjects"),
        ({"pair": "7 2 1\n7 2 0 1\n"}, r"label\.txt: .*#2.* 7 2 0 1;"),
        ({"pair": "7 2\n0 7 2 1\n"}, r"label\.txt: .*#1"),
        ({"pair": "7 2 1\n7 -2 0\n"}, r"label\.txt: .*#2: '7 -2 0'"),
        ({"pair": "7 2 1\n7 2 0\n7 2 2\n"}, r"label\.txt: .*#3: '7 2 2'"),
        ({"pair": "7 2 1\n7 8 0\n"}, r"label\.txt: .*#2: '7 8 0'"),
        ({"pair": b"7 2 1\n\x00\xff 2 0\n"}, r"label\.txt: .*#2"),
        ({"G1": "7,40,img/1.jpg\n"}, r"G1\.csv:1: .*TEMPLATE_ID"),
        ({"G2": HEADER + "2\n"}, r"G2\.csv:2: .*'2'"),
        ({"G2": HEADER + "2,x,\n"}, r"G2\.csv:2: .*'2,x,'"),
        ({"G2": HEADER + "3,1,\n"}, r"G2\.csv:2: .*no images"),
        ({"G2": HEADER + "2,1,\n2,5,\n"}, r"G2\.csv:3: .*another subject"),
        ({"G2": HEADER.encode() + b"\xff,1\n"}, r"G2\.csv:2: "),
        ({"probe": None}, "probe_mixed.csv does not exist"),
    ],
)
def test_bad_files_raise_an_error_with_the_line(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_protocol(write(tmp_path, **changes))


def test_two_datasets_in_one_folder_raise_an_error(tmp_path):
    (write(tmp_path) / "ijbb_face_tid_mid.txt").write_text(IMAGES)
    with pytest.raises(DataError, match=r"ijbb_face_tid_mid\.txt, ijbc_face_tid_mid\.txt"):
        read_protocol(tmp_path)
