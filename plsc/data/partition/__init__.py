"""Shuffle a dataset of base64 lines over all files, and split it into parts with equal numbers of lines."""

from __future__ import annotations

from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.run import partition
from plsc.data.partition.verify import verify

__all__ = ["PartitionOptions", "partition", "verify"]
