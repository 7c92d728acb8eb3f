"""The folder of an exported model: write, check and open it, and embed with it on a cluster."""

import os

from plsc.export.served import BatchEmbedder, ServedModel, batch_embedder, open_model

# onnxruntime sends a lasting id of the machine, and errors, to its maker, from its import on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["BatchEmbedder", "ServedModel", "batch_embedder", "open_model"]
