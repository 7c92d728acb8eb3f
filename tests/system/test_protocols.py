"""`test` with a protocol: the results on any number of ranks, of the command, and of the files it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from plsc.cli import main
from plsc.data.pairs import read_pairs
from plsc.errors import DataError, OptionError
from plsc.evaluate.capacity import Capacity
from tests.distributed.launch import run_ranks
from tests.images import write_dataset, write_pair_file
from tests.system.protocols_worker import arguments_of
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("protocols_worker.py")


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """A dataset with pairs, a gallery of four of its six classes, and distractors."""
    root = tmp_path_factory.mktemp("protocols")
    faces = write_dataset(root / "faces", classes=6, per_class=5)
    write_pair_file(faces / "lfw.bin", faces)
    write_dataset(faces / "distractors", classes=3, per_class=1, seed=9)
    (faces / "gallery").mkdir()
    shutil.copytree(faces / "images", faces / "gallery" / "images")
    (faces / "gallery" / "label.txt").write_text("".join(f"images/{n}_0.png {n}\n" for n in range(4)))
    # The pairs of lfw.bin as a list
    pairs = read_pairs(faces / "lfw.bin")
    by_content = {path.read_bytes(): f"images/{path.name}" for path in (faces / "images").iterdir()}
    paths = np.array([by_content[image] for image in pairs.images]).reshape(-1, 2)
    lines = (f"{a} {b} {flag:d}\n" for (a, b), flag in zip(paths, pairs.is_same, strict=True))
    (faces / "pairs.txt").write_text("".join(lines))
    write_templates(faces / "templates")
    grouped = [f"images/{n}_{k}.png\t{'odd' if n % 2 else 'even'}\n" for n in range(5) for k in range(5)]
    (faces / "groups.tsv").write_text("".join([*grouped, "images/6_0.png\teven\n"]))
    return faces


def write_templates(folder):
    """Write meta files: of each class, templates of images 0 and 1, 2 and 3, and 4."""
    folder.mkdir()
    images = [(f"images/{n}_{k}.png", 3 * n + k // 2) for n in range(6) for k in range(5)]
    pairs = [(a, b, int(a // 3 == b // 3)) for a in range(18) for b in range(a)]
    files = {
        "face_tid_mid.txt": [f"{path} {template} {number}" for number, (path, template) in enumerate(images)],
        "template_pair_label.txt": [f"{a} {b} {flag}" for a, b, flag in pairs],
        "1N_gallery_G1.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{3 * n},{n}" for n in range(4))],
        "1N_gallery_G2.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{3 * n},{n}" for n in range(4, 6))],
        "1N_probe_mixed.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{t},{t // 3}" for t in range(18) if t % 3)],
    }
    for name, lines in files.items():
        (folder / f"glyphs_{name}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def checkpoint(faces):
    return entry(faces, faces.parent / "run").train().checkpoint


@pytest.fixture(scope="module")
def alone(faces, checkpoint):
    """The output folder of the worker on one rank."""
    return run(faces, checkpoint, 1)


def run(faces, checkpoint, ranks):
    output = faces.parent / f"output-{ranks}"
    output.mkdir()
    run_ranks(WORKER, ranks, str(checkpoint), str(faces), str(output))
    return output


def reports(output):
    return {
        path.relative_to(output): path.read_bytes() for path in output.glob("*/*") if path.suffix != ".png"
    }


def test_results_and_reports_do_not_depend_on_the_number_of_ranks(faces, checkpoint, alone):
    output = run(faces, checkpoint, 3)
    expected = (alone / "results-0.json").read_text()
    assert [path.read_text() for path in sorted(output.glob("results-*.json"))] == [expected] * 3
    assert reports(output) == reports(alone)
    shown = {path.name for path in alone.glob("*/*.png")}
    assert shown == {path.name for path in output.glob("*/*.png")}


@pytest.mark.parametrize("case", ["identify", "templates"])
def test_the_command_gives_the_same_report(faces, checkpoint, alone, tmp_path, case):
    flags = [f"--{name}={place}" for name, place in arguments_of(str(faces), case).items()]
    words = [
        *("test", *flags, f"--output={tmp_path}", "--train.test_batch_size=3"),
        *(f"--checkpoint.load_dir={checkpoint}", f"--data.dataset_dir={faces}"),
    ]
    assert main(words) == 0
    assert (tmp_path / "report.json").read_text() == (alone / case / "report.json").read_text()


def test_groups_add_results_and_change_none(alone):
    plain, grouped = (json.loads((alone / case / "report.json").read_text()) for case in ("plain", "pairs"))
    assert grouped.items() >= plain.items()
    added = [values for title, values in grouped.items() if title not in plain]
    assert len(added) == 1
    for values in added:
        assert "of 26 names are of no image, such as 'images/" in values["notes"][1]
        assert all({"even", "odd"} <= set(table) for table in values["tables"].values())


def close_to(result):
    """The metrics of a result, but for the last bits of embeddings in batches of another size."""
    plain = {"threshold", "threshold_cosine", "mean_norm", "threshold_at_far"}
    return {
        name: pytest.approx(value, abs=1e-5) if name in plain else value
        for name, value in result.as_dict().items()
    }


def test_text_lists_are_val_targets_like_bin_files_and_the_default_pairs(faces, checkpoint, alone, tmp_path):
    settings = {"set_val_targets": "lfw,pairs.txt", "set_test_batch_size": 3}
    ins = entry(faces, tmp_path / "run", set_checkpoint_dir=checkpoint, **settings)
    found = ins.test()
    assert found["lfw"].as_dict() == json.loads((alone / "results-0.json").read_text())["bin"]["lfw"]
    assert found["pairs.txt"].as_dict() == close_to(found["lfw"])
    by_protocol = ins.test("pairs", output=tmp_path / "report")
    assert by_protocol.keys() == found.keys()
    assert all(one.as_dict() == close_to(found[name]) for name, one in by_protocol.items())
    ins.set_limit_test_batches(14)  # 21 pairs of 40
    limited = ins.test()
    assert (limited["lfw"].pairs, limited["pairs.txt"].pairs) == (21, 21)
    assert limited["pairs.txt"].as_dict() == close_to(limited["lfw"])


def test_a_run_evaluates_a_text_list(faces, tmp_path):
    settings = {"set_val_targets": "pairs.txt", "set_with_test": True}
    result = entry(faces, tmp_path, set_monitor="pairs.txt accuracy", **settings).train()
    assert result.best_model_score == result.evaluation["pairs.txt"].accuracy


def test_folders_of_classes_are_matched_by_name(faces, checkpoint, alone, tmp_path):
    for part in ("gallery", "probes"):
        for image in sorted((faces / "images").iterdir()):
            label, _, number = image.stem.partition("_")
            # With class 0 only in the gallery, the numbers of the classes differ.
            if (part == "gallery" and number == "0" and label != "5") or (part == "probes" and label != "0"):
                folder = tmp_path / part / f"class {label}"
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(image, folder)
    ins = entry(faces, tmp_path / "run", set_checkpoint_dir=checkpoint)
    places = {"images": tmp_path / "probes", "gallery": tmp_path / "gallery"}
    found = ins.test("identify", **places, output=tmp_path / "report")["identify"]
    assert (found.mated, found.non_mated, found.identities) == (20, 5, 5)
    assert found.ranks.tolist().count(1) >= 4  # each image of the gallery is also a probe
    with pytest.raises(DataError, match="are numbers"):
        ins.test("identify", images=faces, gallery=tmp_path / "gallery", output=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_identification_says_what_a_gallery_holds(checkpoint, faces, tmp_path):
    unseen = write_dataset(tmp_path / "unseen", classes=24, per_class=3, seed=9)
    ins = entry(faces, tmp_path / "run", set_checkpoint_dir=checkpoint)
    found = ins.test("identify", images=unseen, output=tmp_path / "report")
    capacity = found["capacity"].capacity
    assert (capacity.classes, capacity.images) == (24, 72)
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert Capacity.from_dict(report["Capacity"]["table"]) == capacity
    found = ins.test("identify", images=faces, output=tmp_path / "trained")
    assert list(found) == ["identify"]
    assert f"the classes of {faces} were trained" in (tmp_path / "trained/report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"protocol": "pair"}, OptionError, "'pairs'"),
        ({"protocol": "templates"}, OptionError, "templates"),
        ({"protocol": "pairs", "images": "a"}, OptionError, "images"),
        ({"protocol": "pairs", "output": "s3://a/b"}, OptionError, "local folder"),
        ({"protocol": "pairs", "pairs": "nothing.txt"}, DataError, "nothing.txt"),
        ({"protocol": "retrieval", "groups": "none.tsv"}, DataError, "none.tsv"),
        ({"groups": "groups.tsv"}, OptionError, "protocol"),
    ],
)
def test_wrong_arguments_are_errors_before_a_report_is_written(
    faces, checkpoint, tmp_path, monkeypatch, arguments, error, message
):
    monkeypatch.chdir(tmp_path)
    ins = entry(faces, tmp_path / "run", set_checkpoint_dir=checkpoint)
    with pytest.raises(error, match=message):
        ins.test(**arguments)
    assert not (tmp_path / "evaluation").exists()
