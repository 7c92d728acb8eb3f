"""Weights that other programs saved: insightface, PLSC 0.1, safetensors, torch.save.

What torch.save wrote is read by torch's unpickler for weights alone, which runs nothing. Class rows are
read and written piece by piece.
"""

from plsc.checkpoint.importers.convert import LAYOUTS, Imported, import_checkpoint
from plsc.checkpoint.importers.source import Network

__all__ = ["LAYOUTS", "Imported", "Network", "import_checkpoint"]
