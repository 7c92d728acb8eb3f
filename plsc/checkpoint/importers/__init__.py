"""Import weights saved by other programs: insightface, PLSC 0.1, safetensors, torch.save.

Files of torch.save are read with ``weights_only=True``, which runs no code from the file. Class weights are
read and written piece by piece.
"""

from plsc.checkpoint.importers.convert import LAYOUTS, Imported, import_checkpoint
from plsc.checkpoint.importers.source import Network

__all__ = ["LAYOUTS", "Imported", "Network", "import_checkpoint"]
