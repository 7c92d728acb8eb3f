"""Batch norm folding for evaluation: merge each batch norm into the layer before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from plsc.errors import kind_and_line
from plsc.models.base_model import BaseModel, evaluating
from plsc.models.dropout import SampleDropout
from plsc.models.layers import Conv2d, PReLU

TOLERANCE = 1e-3  # relative to the largest embedding value for noise images; folding changes 1e-6 in fp32
_FOLDABLE = (nn.Conv2d, Conv2d, nn.Linear)  # exact types: a subclass may behave differently


def fold_batch_norm(network: BaseModel, image_shape: Sequence[int]) -> BaseModel | str:
    """Return a copy of the network for evaluation with folded batch norms, or the reason why not.

    A batch norm is folded into a convolution or linear layer if it is the only user of that layer's output.
    Changed weights are copies, all others are shared. `network` does not change, and later changes of it do
    not affect the folded weights.

    image_shape: (C, H, W) of noise images, for which both networks must agree to `TOLERANCE`.
    """
    with evaluating(network):
        try:
            graph = _Tracer().trace(network, concrete_args={"label": None, "is_train": False})
        except Exception as error:  # user code that cannot be traced
            return f"torch.fx cannot trace it: {kind_and_line(error)[:200]}"
        modules = dict(network.named_modules())
        traced = fx.GraphModule(network, graph)
        pairs = list(_pairs(graph, modules))
        if not pairs:
            return "it has no batch norm that directly follows a convolution or linear layer"
        for layer_node, norm_node in pairs:
            layer, norm = modules[str(layer_node.target)], modules[str(norm_node.target)]
            fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
            # The traced network has its own copies of the parent modules.
            traced.set_submodule(str(layer_node.target), fuse(layer, norm).requires_grad_(False))
            norm_node.replace_all_uses_with(layer_node)
            graph.erase_node(norm_node)
        traced.recompile()
        folded = FoldedNetwork(traced, network.input_layout)
        apart = _difference(network, folded, image_shape)
    if not apart <= TOLERANCE:
        return f"the embeddings of noise images differ by {apart:.1e} relative to the largest value"
    return folded


class FoldedNetwork(BaseModel):
    """The result of `fold_batch_norm`; for evaluation only."""

    def __init__(self, traced: fx.GraphModule, layout: torch.memory_format) -> None:
        super().__init__()
        self.traced = traced
        self.input_layout = layout
        super().train(False)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]."""
        with evaluating(self.traced):  # it shares layers with a network that may be in training mode
            return self.traced(input, None, False)

    def train(self, mode: bool = True) -> FoldedNetwork:
        """Stay in evaluation mode."""
        return self


class _Tracer(fx.Tracer):
    traced_func_name = "build_network"  # `BaseModel.forward` casts the images, and is called again

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = (_BatchNorm, Conv2d, PReLU, SampleDropout)
        return isinstance(m, ours) or super().is_leaf_module(m, module_qualified_name)


def _pairs(graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (layer, batch norm) nodes that can be folded; both modules are called exactly once."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(id(modules[str(node.target)]) for node in calls)
    for node in calls:
        norm, before = modules[str(node.target)], node.args[0] if node.args else None
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None:
            continue
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        layer = modules[str(before.target)]
        is_pair = isinstance(layer, nn.Linear) != isinstance(norm, nn.BatchNorm2d)
        is_hooked = any(one._forward_hooks or one._forward_pre_hooks for one in (layer, norm))
        is_once = times[id(layer)] == times[id(norm)] == 1
        if type(layer) in _FOLDABLE and is_pair and is_once and not is_hooked:
            yield before, node


def _difference(network: BaseModel, other: BaseModel, image_shape: Sequence[int]) -> float:
    """Return the largest difference between the networks' embeddings of noise images, relative to the max."""
    first = next(p for p in network.parameters() if p.is_floating_point())
    noise = torch.rand(2, *image_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    noise = noise.to(first.device, first.dtype)
    with torch.inference_mode(), torch.autocast(first.device.type, enabled=False):
        mine, theirs = network(noise, None, False), other(noise, None, False)
    return float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-30))
