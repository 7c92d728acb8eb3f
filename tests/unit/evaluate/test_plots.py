import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from plsc.errors import DataError
from plsc.evaluate import plots
from plsc.evaluate.plots import plot_roc


def assert_picture(path):
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        colours = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colours) > 10
    assert [other for other in path.parent.iterdir() if other.name.endswith(".tmp")] == []


@pytest.fixture
def drawn(monkeypatch):
    """Record the plotted lines: (label, x, y)."""
    lines = []
    plot = Axes.plot

    def record(axes, x, y, **options):
        lines.append((options.get("label"), np.asarray(x), np.asarray(y)))
        return plot(axes, x, y, **options)

    monkeypatch.setattr(Axes, "plot", record)
    return lines


def test_roc_starts_at_one_false_accept(tmp_path, drawn):
    is_same = np.array([True, True, False, True, False])
    cosines = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    plot_roc({"net": (cosines, is_same)}, tmp_path / "roc.png")
    label, far, tar = drawn[0]
    assert label.strip() == "net  (AUC 0.833)"
    assert far.tolist()[-2:] == [0.5, 1.0]
    assert tar.tolist()[-2:] == [1.0, 1.0]
    assert_picture(tmp_path / "roc.png")
    assert not hasattr(plots, "pyplot")  # it would choose a backend for the whole process


def test_roc_supports_any_name_and_many_curves(tmp_path):
    scores, names = np.random.default_rng(0).random(40), ["_lfw", "$x_", "a\\frac{", "%"]
    curves = {f"{name}{index}": (scores, scores < 0.5) for index, name in enumerate(names * 3)}
    plot_roc(curves, tmp_path / "roc.png")
    assert_picture(tmp_path / "roc.png")


def test_what_cannot_be_drawn_is_an_error(tmp_path):
    pair = (np.ones(2), np.arange(2) > 0)
    for curve, path, message in (
        ((np.ones(3), np.ones(3, bool)), tmp_path / "out.png", "only same"),
        (pair, tmp_path / "missing" / "out.png", "cannot write"),
    ):
        with pytest.raises(DataError, match=message):
            plot_roc({"net": curve}, path)
    assert not (tmp_path / "out.png").exists()
