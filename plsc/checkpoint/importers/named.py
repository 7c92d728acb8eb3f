"""A network's tensors under its own names: .safetensors, or a state dict of torch.save."""

from __future__ import annotations

from pathlib import Path

from plsc.checkpoint.importers.insightface import iresnet_source, is_iresnet
from plsc.checkpoint.importers.row_parts import join_rows
from plsc.checkpoint.importers.source import BIAS, WEIGHT, Network, Source
from plsc.checkpoint.importers.state_dict import read_state_dict
from plsc.errors import CheckpointError


def read_named(path: Path, layout: str, given: Network) -> Source:
    """Return the tensors of one file; class rows are named head.weight (and head.bias).

    See `read_state_dict` for when they are.

    given: the network. An iresnet of insightface is recognised without it.

    Raises:
        CheckpointError: no such file, a damaged or malicious one, or no network is given.
    """
    state, head = read_state_dict(path, follow_links=True)
    if given.name is None:
        if not is_iresnet(state):
            raise CheckpointError(
                f"{path} does not say which network it is of; name it with --model, such as "
                "torchvision/resnet18, with its --emb_size and --image_shape"
            )
        source = iresnet_source(state, str(path))
        source.layout = layout
    else:
        source = Source(layout, given, state, is_whole=False)
    for key in (WEIGHT, BIAS):
        if key in head:
            source.rows[key] = join_rows([head[key]], key)
    source.loss_type = "dist_softmax" if BIAS in source.rows else "dist_arcface"
    return source
