"""The font faces of the demo, separate ones for training and evaluation.

Classes and evaluation use only the fonts of matplotlib, so they are the same on every machine. Training also
uses system fonts if there are any.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from render import plain

# The STIX family and one or two faces of each DejaVu family are used for evaluation only.
EVALUATION_FACES = (
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralBolIta",
    "STIXGeneralItalic",
)
TRAINING_FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
)
# The charmaps of the TeX fonts follow Unicode for ASCII letters and digits only.
TEX_FACES = ("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")
ASCII = frozenset(map(ord, string.ascii_letters + string.digits))

SYSTEM_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)
MAX_SYSTEM_FACES = 8


@dataclass(frozen=True)
class Face:
    """A font file and the code points it can draw."""

    name: str
    path: str
    family: str
    evaluation: bool
    code_points: frozenset[int]


def bundled_faces() -> list[Face]:
    """Return the faces of matplotlib that the demo uses, in a fixed order."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = []
    for name in TRAINING_FACES + TEX_FACES + EVALUATION_FACES:
        face = read_face(folder / f"{name}.ttf", evaluation=name in EVALUATION_FACES)
        if name in TEX_FACES:
            face = Face(face.name, face.path, face.family, False, face.code_points & ASCII)
        faces.append(face)
    return faces


def system_faces(bundled: list[Face]) -> list[Face]:
    """Return system faces for training, at most MAX_SYSTEM_FACES.

    Families that matplotlib bundles are excluded, because they would add evaluation faces to training.
    """
    families = {face.family for face in bundled}
    found: dict[str, Face] = {}
    files = [f for folder in SYSTEM_FOLDERS for f in Path(folder).glob("**/*.[to]tf")]
    for file in sorted(files):
        try:
            face = read_face(file, evaluation=False)
        except (RuntimeError, OSError):  # not a font that FreeType can read
            continue
        if face.family in families or face.family in found:  # one face per family, for variety
            continue
        if face.code_points >= ASCII and draws_letters_like(face, bundled[0]):
            found[face.family] = face
        if len(found) == MAX_SYSTEM_FACES:
            break
    return list(found.values())


def draws_letters_like(face: Face, reference: Face) -> bool:
    """Return whether the letters of a face look like letters, unlike bar codes, icons and boxes."""
    similarities = []
    for letter in "AEHKLMOTXahkox":
        images = [plain(f.path, letter, 24) for f in (face, reference)]
        if images[0] is None or images[1] is None:
            return False
        a, b = (image / np.linalg.norm(image) for image in images if image is not None)
        similarities.append(float(np.sum(a * b)))
    return float(np.median(similarities)) > 0.6


def read_face(path: Path, *, evaluation: bool) -> Face:
    """Read a font file; glyph 0 (.notdef, the box for missing characters) does not count as drawn."""
    font = FT2Font(str(path))
    drawn = frozenset(code for code, glyph in font.get_charmap().items() if glyph != 0)
    return Face(path.stem, str(path), font.family_name, evaluation, drawn)
