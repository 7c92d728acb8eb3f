"""demo/words.py on a made-up text, in one process and on two ranks."""

import random
import re
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

DEMO = Path(__file__).parents[2] / "demo/words.py"


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


@pytest.mark.slow
def test_the_demo_learns_words_as_well_as_a_full_softmax(tmp_path):
    text = write_text(tmp_path / "texts")
    for ranks in (0, 2):
        run = tmp_path / str(ranks)
        settings = ("--text", str(text), "--steps", "60", "--batch", "50", "--min-count", "1")
        out = run_ranks(DEMO, ranks, str(run), *settings).stdout
        by_frequency, ours, theirs = (float(found) for found in re.findall(r"^  .+?  +([\d.]+)", out, re.M))
        assert ours == pytest.approx(theirs, rel=0.01)
        assert ours < by_frequency / 3
