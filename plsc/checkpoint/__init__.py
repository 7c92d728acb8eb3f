"""Checkpoints: atomic, without pickles, readable on any number of ranks."""

from plsc.checkpoint.load import load_tensors, load_weights
from plsc.checkpoint.manifest import Manifest, list_checkpoints, read_manifest
from plsc.checkpoint.save import Retention, ShardedTensor, Snapshot, save_checkpoint

__all__ = [
    "Manifest",
    "Retention",
    "ShardedTensor",
    "Snapshot",
    "list_checkpoints",
    "load_tensors",
    "load_weights",
    "read_manifest",
    "save_checkpoint",
]
