"""Checkpoints: atomic, without pickles, readable on any number of ranks."""

from plsc.checkpoint.load import load_tensors, load_weights
from plsc.checkpoint.manifest import Manifest, read_manifest
from plsc.checkpoint.retention import Retention, list_checkpoints
from plsc.checkpoint.save import ShardedTensor, Snapshot, save_checkpoint

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
