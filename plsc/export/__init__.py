"""The folder of an exported model: write, check and open it, and embed with it on a cluster."""

from plsc.export.served import BatchEmbedder, ServedModel, batch_embedder, open_model

__all__ = ["BatchEmbedder", "ServedModel", "batch_embedder", "open_model"]
