"""Photos with a face that is not aligned, and their landmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data.alignment import TEMPLATE


def smooth_image(height: int, width: int, seed: int) -> np.ndarray:
    """Return a random image without sharp edges, uint8 [H, W, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 12 + 2, width // 12 + 2, 3))
    image = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def turned(points: np.ndarray, degrees: float, scale: float, shift: tuple[float, float]) -> np.ndarray:
    """Return points [N, 2] after a similarity transform."""
    angle = np.deg2rad(degrees)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return points @ turn.T + shift


def write_photos(root: Path, classes: int = 3, per_class: int = 6) -> dict[str, np.ndarray]:
    """Write class folders of photos and landmarks.txt; return the landmarks, float64 [5, 2], by path."""
    rng = np.random.default_rng(0)
    found = {}
    for number in range(classes * per_class):
        path = f"c{number % classes}/{number}.png"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth_image(140, 160, number)).save(root / path)
        points = turned(TEMPLATE, rng.uniform(-30, 30), rng.uniform(0.3, 1), (rng.uniform(40, 60), 20))
        found[path] = points.round(2)
    lines = [f"{path} {' '.join(map(str, points.ravel()))} 0.99\n" for path, points in found.items()]
    (root / "landmarks.txt").write_text("".join(lines))
    return found
