"""A GPU, for tests that need one or run on one, too."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
GPU = pytest.param("cuda", marks=NEEDS_GPU)
