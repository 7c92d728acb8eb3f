"""Networks (backbones) that map images to embeddings. The files imported here add their networks by name."""

from plsc.models import libraries, resnet
from plsc.models.base_model import NETWORKS, BaseModel, build_model, check_model

__all__ = ["NETWORKS", "BaseModel", "build_model", "check_model", "libraries", "resnet"]
