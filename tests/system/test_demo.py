"""The demo: its data has the properties that the report claims, and all its scripts run on a part of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.data.pairs import read_pairs
from tests.distributed.launch import run_ranks
from tests.resuming import losses_of

REPO = Path(__file__).parents[2]
DEMO = REPO / "demo"
sys.path.insert(0, str(DEMO))

import make_glyphs  # noqa: E402
from fonts import bundled_faces, system_faces  # noqa: E402
from glyph_classes import GlyphClass, find_classes  # noqa: E402
from make_glyphs import split_classes, training_faces  # noqa: E402

pytestmark = pytest.mark.slow
FACES = bundled_faces()
SMALL = ("--classes", 130, "--images-per-class", 6, "--pairs", 200)


def run(script: str, *arguments: object, ranks: int = 0, check: bool = True) -> str:
    """Run a script of the demo and return its stderr; print its output if it fails."""
    command = DEMO / script, ranks, *map(str, arguments)
    return run_ranks(*command, check=check, env={"DRAW_LOSSES": "1"}).stderr


@pytest.fixture(scope="module")
def classes() -> list[GlyphClass]:
    return find_classes(FACES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, classes: list[GlyphClass]) -> Path:
    """A small data set."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_glyphs, "find_classes", lambda faces: classes)  # it takes longer than all else
        patch.setattr(sys, "argv", ["make_glyphs.py", *map(str, (folder / "glyphs", *SMALL))])
        make_glyphs.main()
    return folder / "glyphs"


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    """A run of train_glyphs.py and report.py: few classes, two ranks."""
    folder = data.parent / "run"
    run("train_glyphs.py", data, folder, "--epochs", 4, ranks=2)
    run("report.py", data, folder)
    return folder


def class_of(classes: list[GlyphClass], character: str) -> set[str]:
    return {chr(c) for k in classes if ord(character) in k.code_points for c in k.code_points}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("A", "\N{GREEK CAPITAL LETTER ALPHA}", True),
        ("A", "\N{CYRILLIC CAPITAL LETTER A}", True),
        ("\N{HYPHEN}", "-", True),
        ("A", "\N{GREEK CAPITAL LETTER LAMDA}", False),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{LATIN SMALL LETTER E WITH GRAVE}", False),
        ("P", "\N{LATIN CAPITAL LETTER THORN}", False),
        ("\N{RIGHTWARDS ARROW}", "\N{LEFTWARDS ARROW}", False),
    ],
)
def test_code_points_are_one_class_when_and_only_when_their_outlines_are_the_same(
    classes: list[GlyphClass], one: str, other: str, same: bool
) -> None:
    assert one in class_of(classes, one)
    assert (other in class_of(classes, one)) == same


def test_at_least_3000_classes_train_and_no_held_out_one_among_them(classes: list[GlyphClass]) -> None:
    seen, unseen = split_classes(classes, FACES, limit=0, seed=1)
    assert len(seen) >= 3000
    assert 0.1 * len(classes) < len(unseen) < 0.15 * len(classes)
    codes = [{c for item in part for c in item.code_points} for part in (seen, unseen)]
    assert not codes[0] & codes[1]


def test_no_face_trains_and_evaluates(classes: list[GlyphClass]) -> None:
    evaluation = {face.name for face in FACES if face.evaluation}
    training = {face.name for face in FACES if not face.evaluation}
    assert evaluation
    assert not evaluation & training
    assert all(not f.evaluation for item in classes for f, _ in training_faces(item, FACES))
    families = {face.family for face in FACES}
    assert all(f.family not in families and not f.evaluation for f in system_faces(FACES))


def test_every_fold_is_balanced_and_half_of_the_negatives_are_hard(data: Path) -> None:
    pairs = read_pairs(data / "glyphs_unseen.bin")
    lines = (data / "glyphs_unseen.tsv").read_text(encoding="utf-8").splitlines()[1:]
    kind, _, first_face, _, second_face = zip(*(x.split("\t") for x in lines), strict=True)
    kinds = np.array(kind)
    assert len(pairs) == 200
    assert np.array_equal(pairs.is_same, kinds == "same")
    assert all(fold.sum() == len(fold) / 2 for fold in np.array_split(pairs.is_same, 10))
    assert (kinds == "hard").sum() == (kinds == "random").sum()
    assert all(a != b for a, b in zip(first_face, second_face, strict=True))
    evaluation = {face.name for face in FACES if face.evaluation}
    assert evaluation >= {*first_face, *second_face}


def test_the_demo_trains_on_two_ranks_and_leaves_what_it_promises(trained: Path) -> None:
    for name in ("metrics.jsonl", "loss.png", "roc.png", "report.md", "summary.txt"):
        assert (trained / name).stat().st_size > 0
    summary = (trained / "summary.txt").read_text()
    assert summary.startswith("demo: ")
    assert " classes, 2 ranks, verification accuracy " in summary
    figures = json.loads((trained / "figures.json").read_text())
    others = max(figures[name]["accuracy_without_hard"] for name in ("pixels", "untrained"))
    assert figures["trained"]["accuracy_without_hard"] > others
    for protocol in ("pairs", "identify", "templates"):
        assert f"(protocols/{protocol}/report.md)" in (trained / "report.md").read_text()
        assert (trained / "protocols" / protocol / "report.md").stat().st_size > 0
    assert "$" not in (trained / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["custom_model.py", "custom_reader.py", "watch_training.py"])
def test_the_small_examples_learn(data: Path, script: str) -> None:
    folder = data.parent / script
    run(script, data, folder, "--steps", 10)
    losses = list(losses_of(folder).values())
    assert losses[-1] < losses[0]


def write_text(folder):
    """Write sentences in which the neighbours determine the middle word."""
    draw = random.Random(0)
    letters = "abcdefgh"
    lines = []
    for _ in range(300):
        a, b = draw.choice(letters), draw.choice(letters)
        lines.append(f"{a}x {b}y {a}{b} {b}z {a}w\n%")
    folder.mkdir()
    (folder / "text").write_text("\n".join(lines))
    (folder / "text.dat").write_bytes(b"\0\xff")
    (folder / "text.u8").symlink_to("text")
    return folder


def test_the_demo_learns_words_as_well_as_a_full_softmax(tmp_path):
    text = write_text(tmp_path / "texts")
    for ranks in (0, 2):
        run = tmp_path / str(ranks)
        settings = ("--text", str(text), "--steps", "60", "--batch", "50", "--min-count", "1")
        out = run_ranks(DEMO / "words.py", ranks, str(run), *settings).stdout
        by_frequency, ours, theirs = (float(found) for found in re.findall(r"^  .+?  +([\d.]+)", out, re.M))
        assert ours == pytest.approx(theirs, rel=0.01)
        assert ours < by_frequency / 3


@pytest.mark.parametrize(("ranks", "ratio"), [(1, 1.0), (3, 0.5)])
def test_nano_equals_the_library_over_100_steps_and_resumes_bit_for_bit(tmp_path, ranks, ratio):
    run_ranks(REPO / "tests/distributed/nano_worker.py", ranks, str(ratio), str(tmp_path / "run"))


def class_weights(folder: Path) -> torch.Tensor:
    shards = [torch.load(path) for path in folder.glob("rank-*.pt")]
    return torch.cat([shard["weight"] for shard in sorted(shards, key=lambda shard: shard["start"])])


def test_the_script_resumes_on_other_ranks_after_a_kill_within_a_save(tmp_path):
    first = tmp_path / "first"
    options = ("--classes", "20", "--folder")
    output = run_ranks(DEMO / "nano_plsc.py", 2, *options, str(first), "--steps", "20").stdout
    assert "step 20: loss" in output
    (first / "partial").mkdir()
    (first / "partial" / "rank-0.pt").write_bytes(b"cut short")
    weights = []
    for ranks in (0, 3):
        run = shutil.copytree(first, tmp_path / f"resumed-{ranks}")
        run_ranks(DEMO / "nano_plsc.py", ranks, *options, str(run), "--steps", "22", "--resume")
        assert sorted(path.name for path in run.iterdir()) == ["step-0000020", "step-0000022"]
        weights.append(class_weights(run / "step-0000022"))
    assert not torch.equal(weights[0], class_weights(first / "step-0000020"))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-6)
    refused = run_ranks(DEMO / "nano_plsc.py", 0, *options, str(first), check=False)
    assert refused.returncode == 1
    assert "--resume" in refused.stderr
