"""Read checkpoints of insightface's arcface_torch: a backbone, and one file of class weights per rank.

``checkpoint_gpu_<rank>.pt`` of PartialFC and PartialFC_V2 (train.py, train_v2.py): state_dict_backbone,
state_dict_softmax_fc {weight [C_local, D]}, state_optimizer. Older: ``rank_<rank>_softmax_weight.pt`` (or
``<rank>_softmax_weight.pt``) and ``..._weight_mom.pt`` next to ``backbone.pth``. Rank r of R has C // R
consecutive classes, and one more if r < C % R.
https://github.com/deepinsight/insightface/tree/master/recognition/arcface_torch
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.checkpoint.importers.source import (
    WEIGHT,
    WEIGHT_MOMENTUM,
    Network,
    Source,
    files_by_rank,
    join_rows,
    names_in,
    square_side,
)
from plsc.checkpoint.importers.tensor_files import read_state_dict, read_tensors, strip, unwrap
from plsc.errors import CheckpointError
from plsc.models.iresnet import BLOCKS, WIDTHS
from plsc.models.neck import DOWNSAMPLING

LAYOUT = "insightface"
_STATES = re.compile(r"checkpoint_gpu_(\d{1,6})\.pth?")
_WEIGHTS = re.compile(r"(?:rank_)?(\d{1,6})_softmax_weight\.pth?")
_MOMENTA = re.compile(r"(?:rank_)?(\d{1,6})_softmax_weight_mom\.pth?")
_BACKBONE = re.compile(r"(\d*)_?backbone\.pth?|model\.pth?")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_insightface(path: Path) -> bool:
    """Return whether a folder has files with these names; their content is not read."""
    return path.is_dir() and any(
        pattern.fullmatch(name) for name in names_in(path) for pattern in (_STATES, _WEIGHTS)
    )


def is_iresnet(state: Mapping[str, object]) -> bool:
    """Return whether a state dict has the parameter names of an iresnet."""
    return {"conv1.weight", "prelu.weight", "layer4.0.bn3.weight", "features.weight"} <= set(state)


def read_insightface(path: Path) -> Source:
    """Read a folder of these files, or one file with a backbone's state dict.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, malicious, or of different sizes.
    """
    if not path.is_dir():
        return iresnet_source(read_state_dict(path, follow_links=True)[0], str(path))
    states = files_by_rank(path, _STATES, "the state")
    return _read_states(states) if states else _read_weights(path)


def iresnet_source(state: Mapping[str, Tensor], where: str) -> Source:
    """Return the source for an iresnet's state dict; its number of blocks gives the depth."""
    if not is_iresnet(state):
        raise CheckpointError(
            f"{where} is not an iresnet; name its network with --model, and pass --layout state_dict"
        )
    blocks = tuple(
        len({name.split(".")[1] for name in state if name.startswith(f"layer{stage}.")})
        for stage in (1, 2, 3, 4)
    )
    depth = next((depth for depth, have in BLOCKS.items() if have == blocks), None)
    weight = state.get("fc.weight")
    if depth is None or weight is None or len(weight.shape) != 2:
        raise CheckpointError(
            f"{where} is an iresnet with {blocks} blocks; expected a depth of "
            f"{', '.join(map(str, BLOCKS))}, or name its network with --model and --layout state_dict"
        )
    emb_size, inputs = weight.shape
    side = square_side(inputs // WIDTHS[-1], DOWNSAMPLING) if inputs % WIDTHS[-1] == 0 else None
    channels = state["conv1.weight"].shape[1] if len(state["conv1.weight"].shape) == 4 else 3
    shape = (channels, side, side) if side else None
    # insightface has the option, but trains without it.
    options: dict[str, object] = {"model.dropout": 0.0}
    network = Network(f"IResNet{depth}", emb_size, shape)
    return Source(LAYOUT, network, state, is_whole=True, options=options)


def _read_states(files: dict[int, Path]) -> Source:
    weights: list[Tensor] = []
    momenta: list[Tensor] = []
    source = None
    for rank, path in files.items():
        content = read_tensors(path)
        head = content.get("state_dict_softmax_fc") if isinstance(content, dict) else None
        weight = head.get("weight") if isinstance(head, dict) else None
        if not isinstance(weight, Tensor):
            raise CheckpointError(f"{path} has no class weights (state_dict_softmax_fc); download it again")
        weights.append(weight)
        optimizer = _optimizer_state(content)
        momentum = optimizer[-1] if optimizer else None
        if momentum is not None and momentum.shape == weight.shape:
            momenta.append(momentum)
        if rank == 0:
            state = strip(unwrap({"backbone": content.get("state_dict_backbone")}))
            source = iresnet_source(state, str(path))
            source.momentum = _backbone_momentum(state, optimizer)
            steps = [content.get(name) for name in ("epoch", "global_step")]
            if all(type(number) is int for number in steps):
                source.notes.append(f"saved at epoch {steps[0]}, step {steps[1]}")
    assert source is not None  # files_by_rank guarantees rank 0
    _add_rows(source, weights, momenta, files[0].parent)
    return source


def _read_weights(path: Path) -> Source:
    files = files_by_rank(path, _WEIGHTS, "class weights")
    if not files:
        raise CheckpointError(
            f"{path} has neither checkpoint_gpu_<rank>.pt nor rank_<rank>_softmax_weight.pt; give a folder "
            "with the files of all ranks, or the file of a backbone"
        )
    source = iresnet_source(read_state_dict(_backbone_in(path))[0], str(_backbone_in(path)))
    momenta = files_by_rank(path, _MOMENTA, "momentum")
    tensors = [_one_tensor(file) for file in files.values()]
    buffers = [_one_tensor(file) for file in momenta.values()]
    if [t.shape for t in buffers] != [t.shape for t in tensors]:
        buffers = []
    _add_rows(source, tensors, buffers, path)
    return source


def _backbone_in(path: Path) -> Path:
    """Return the backbone's file; the last one if there are several steps."""
    candidates = [(int(m[1] or -1), m[0]) for m in map(_BACKBONE.fullmatch, names_in(path)) if m]
    if not candidates:
        raise CheckpointError(f"{path} has class weights but no backbone.pth; copy it there")
    named = [name for number, name in candidates if number < 0]
    return path / (named[0] if named else max(candidates)[1])


def _one_tensor(path: Path) -> Tensor:
    tensor = read_tensors(path)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} contains a {type(tensor).__name__}; expected one tensor")
    return tensor


def _add_rows(source: Source, weights: list[Tensor], momenta: list[Tensor], where: Path) -> None:
    sizes = [weight.shape[0] if len(weight.shape) == 2 else -1 for weight in weights]
    total, ranks = sum(sizes), len(sizes)
    expected = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    if -1 in sizes or sizes != expected:
        odd = next(rank for rank in range(ranks) if -1 in sizes or sizes[rank] != expected[rank])
        raise CheckpointError(
            f"{where}: {str(list(weights[odd].shape))[:80]} does not fit the class weights of rank {odd} of "
            f"{ranks}, the others are {str(sizes)[:80]}; files are missing or from different runs"
        )
    source.rows[WEIGHT] = join_rows(weights, f"the class weights of {where}")
    if len(momenta) == ranks:
        source.rows[WEIGHT_MOMENTUM] = join_rows(momenta, f"the momentum of {where}")


def _optimizer_state(content: Any) -> list[Tensor | None]:
    """Return SGD's momentum per parameter, in the order of the parameters; the head's is the last."""
    try:
        state = content["state_optimizer"]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        buffers = [state["state"].get(number, {}).get("momentum_buffer") for number in numbers]
    except (LookupError, TypeError, AttributeError):  # missing, or of another optimizer
        return []
    return [buffer if isinstance(buffer, Tensor) else None for buffer in buffers]


def _backbone_momentum(state: Mapping[str, Tensor], momenta: list[Tensor | None]) -> dict[str, Tensor]:
    """Return the momentum by parameter name; a state dict has parameters and buffers in their order."""
    names = [name for name in state if not name.endswith(_BUFFERS)]
    if len(momenta) != len(names) + 1:
        return {}
    return {
        name: momentum
        for name, momentum in zip(names, momenta[:-1], strict=True)
        if momentum is not None and momentum.shape == state[name].shape
    }
