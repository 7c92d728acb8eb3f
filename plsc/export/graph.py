"""Write a network as a graph in float32: ONNX or torch.export."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from plsc.errors import refusing
from plsc.export.folder import DIVISORS, ONNX_NAME, TORCH_NAME, TRITON_NAME, describe_file
from plsc.models import BaseModel
from plsc.models.base_model import unwrap
from plsc.version import install

INPUT, OUTPUT = "images", "embeddings"
GRAPHS = ("onnx", "torch", "none")


class Served(nn.Module):
    """A network as it is served: float32 images [b, C, H, W] to L2-normalised float32 embeddings [b, D].

    flip: add the embedding of the mirrored image; both are computed in one pass over 2b images. scale: factor
    of the images. mirror: the columns of a mirrored image, int64 [W], for ONNX.
    """

    def __init__(self, network: BaseModel, flip: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.network = network
        self.flip = flip
        self.scale = scale
        self.mirror: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Return the embeddings."""
        if self.scale != 1:
            images = images * self.scale
        # OpenCV or the preprocessing of onnxruntime's quantisation fail on Slice with a negative step; OpenCV
        # 4.8 sums over the first axis wrongly.
        if self.flip:
            mirrored = images.flip(3) if self.mirror is None else images.index_select(3, self.mirror)
            both = self.network(torch.cat([images, mirrored]), None, False).float()
            both = both.reshape(2, -1, both.shape[1])
            found = both[0] + both[1]
        else:
            found = self.network(images, None, False).float()
        return _normalised(found)


def _normalised(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    """Do what ``F.normalize`` does, without the Expand and ReduceL2 on which the same readers fail."""
    if p != 2:
        return input / input.norm(p, dim, keepdim=True).clamp_min(eps)
    found = input.float()
    return (found / (found * found).sum(dim, keepdim=True).sqrt().clamp_min(eps)).to(input.dtype)


def as_served(network: BaseModel, flip: bool) -> Served:
    """Return a copy of a network in float32 on the CPU, in evaluation mode."""
    plain = copy.deepcopy(network)
    unwrap(plain)
    plain.input_layout = torch.preserve_format
    plain.to("cpu", torch.float32)
    plain.to(memory_format=torch.contiguous_format)
    return Served(plain, flip).eval().requires_grad_(False)


def write_graph(
    folder: Path, served: Served, kind: str, image_shape: Sequence[int], layout: str = "plain"
) -> dict[str, Any]:
    """Write the graph of a network to a folder, and return its description for model.json.

    Args:
        folder: an existing folder.
        served: the network.
        kind: ``onnx`` or ``torch``.
        image_shape: (C, H, W).
        layout: one of DIVISORS; for ``torch``, only ``plain``.

    Raises OptionError for a network that cannot be exported.
    """
    graph = Served(copy.deepcopy(served.network), served.flip, DIVISORS[layout] / 128).eval()
    if kind == "onnx":
        graph.mirror = torch.arange(image_shape[2] - 1, -1, -1)
    name = TORCH_NAME if kind == "torch" else TRITON_NAME if layout == "triton" else ONNX_NAME
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    example = (torch.zeros(2, *image_shape),)
    what = f"{type(served.network).__name__} cannot be exported to {kind}"
    advice = "torch.export must be able to trace build_network; or choose graph 'none'"
    about: dict[str, Any] = {}
    own = patch.object(nn.functional, "normalize", _normalised)  # in networks of users
    with refusing(what, advice), torch.no_grad(), _quiet(), own:
        dynamic = {INPUT: {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(graph, example, dynamic_shapes=dynamic)
        if kind == "torch":
            torch.export.save(program, path)
        else:
            about["opset"] = _write_onnx(path, program)
    return {
        **describe_file(folder, name),
        "layout": layout,
        "input": INPUT,
        "output": OUTPUT,
        "normalised": True,
        "flip": served.flip,
        **about,
    }


def missing_package() -> str:
    """Return what must be installed for ONNX, empty if nothing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        return f"a package ({error}): {install('export')}"
    return ""


def _write_onnx(path: Path, program: torch.export.ExportedProgram) -> int:
    """Write an ONNX file, and return its opset."""
    import onnx

    batch = {INPUT: {0: "batch"}}  # the name of the dimension
    converted = torch.onnx.export(
        program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], dynamic_shapes=batch, verbose=False
    )
    assert converted is not None
    model = converted.model_proto
    # They contain stack traces with the paths of this machine.
    for one in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del one.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
    onnx.save(model, path)
    return next(int(one.version) for one in model.opset_import if not one.domain)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of the exporters: the graph is checked instead."""
    root, silent = logging.getLogger(), logging.NullHandler()
    disabled = root.manager.disable
    root.addHandler(silent)  # logging.warning() would install a handler for all messages
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled)
            root.removeHandler(silent)
