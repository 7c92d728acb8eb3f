"""Networks (backbones) that map images to embeddings."""

from plsc.models.base_model import BaseModel
from plsc.models.dry_run import check_model, describe
from plsc.models.recomputation import find_blocks
from plsc.models.registry import build_model, load_custom

__all__ = ["BaseModel", "build_model", "check_model", "describe", "find_blocks", "load_custom"]
