"""Weights that other programs saved: insightface, PLSC 0.1, safetensors, torch.save.

No pickle is loaded: what torch.save wrote is read as a data format (`torch_file`). Class rows are read
and written piece by piece.
"""

from plsc.checkpoint.importers.convert import Imported, import_checkpoint
from plsc.checkpoint.importers.layouts import LAYOUTS
from plsc.checkpoint.importers.source import Network

__all__ = ["LAYOUTS", "Imported", "Network", "import_checkpoint"]
