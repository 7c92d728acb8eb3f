"""Which layout some files are in, and its reader."""

from __future__ import annotations

from pathlib import Path

from plsc.checkpoint.importers.insightface import LAYOUT as INSIGHTFACE
from plsc.checkpoint.importers.insightface import is_insightface, read_insightface
from plsc.checkpoint.importers.named import read_named
from plsc.checkpoint.importers.plsc1 import LAYOUT as PLSC1
from plsc.checkpoint.importers.plsc1 import is_plsc1, read_plsc1
from plsc.checkpoint.importers.source import Network, Source
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.errors import CheckpointError

SAFETENSORS, STATE_DICT = "safetensors", "state_dict"
LAYOUTS = ("auto", INSIGHTFACE, PLSC1, SAFETENSORS, STATE_DICT)


def read_source(path: Path, layout: str, given: Network) -> Source:
    """Return the weights at a path. layout: one of LAYOUTS; given: the network, where the files do not say.

    Raises:
        CheckpointError: files missing, doubled, damaged, malicious, or of no layout known here.
    """
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}; expected weights to import")
    if layout == "auto":
        layout = _recognise(path)
    if layout == INSIGHTFACE:
        found = read_insightface(path)
    elif layout == PLSC1:
        found = read_plsc1(path, given)
    else:
        found = read_named(path, layout, given)
    found.network = given.or_else(found.network)
    return found


def _recognise(path: Path) -> str:
    if not path.is_dir():
        return SAFETENSORS if path.suffix == ".safetensors" else STATE_DICT
    if (path / MANIFEST_NAME).exists():
        raise CheckpointError(f"{path} is a checkpoint already; load it as it is")
    layouts = [(INSIGHTFACE, is_insightface(path)), (PLSC1, is_plsc1(path))]
    recognised = [name for name, is_one in layouts if is_one]
    if len(recognised) != 1:
        raise CheckpointError(
            f"{path} holds {' and '.join(recognised) if recognised else 'no layout known here'}; "
            f"name one with --layout ({', '.join(LAYOUTS[1:])}), or give one file"
        )
    return recognised[0]
