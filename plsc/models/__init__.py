"""Networks that turn images into embeddings."""

from plsc.models.base_model import BaseModel
from plsc.models.dry_run import check_model, describe
from plsc.models.registry import build_model, load_custom

__all__ = [
    "BaseModel",
    "build_model",
    "check_model",
    "describe",
    "load_custom",
]
