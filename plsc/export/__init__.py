"""The folder of an exported model: write it, check it, and open it for serving."""

from plsc.export.served import ServedModel, open_model

__all__ = ["ServedModel", "open_model"]
