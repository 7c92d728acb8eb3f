"""Read checkpoints of insightface's arcface_torch: a backbone, and one file of class weights per rank.

``checkpoint_gpu_<rank>.pt`` of PartialFC and PartialFC_V2 (train.py, train_v2.py): state_dict_backbone,
state_dict_softmax_fc {weight [C_local, D]}. Older: ``rank_<rank>_softmax_weight.pt`` (or
``<rank>_softmax_weight.pt``) next to ``backbone.pth``. Rank r of R has C // R consecutive classes, and one
more if r < C % R. The state of the optimizer is not read.
https://github.com/deepinsight/insightface/tree/master/recognition/arcface_torch
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from plsc.checkpoint.importers.source import (
    WEIGHT,
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
_RANK_STATES = re.compile(r"checkpoint_gpu_(\d{1,6})\.pth?")
_WEIGHTS = re.compile(r"(?:rank_)?(\d{1,6})_softmax_weight\.pth?")
STATES = re.compile(f"{_RANK_STATES.pattern}|{_WEIGHTS.pattern}")
_BACKBONE = re.compile(r"(\d*)_?backbone\.pth?|model\.pth?")


def read_insightface(path: Path) -> Source:
    """Read a folder of these files, or one file with a backbone's state dict.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, malicious, or of different sizes.
    """
    if not path.is_dir():
        return iresnet_source(read_state_dict(path, follow_links=True)[0], str(path))
    states = files_by_rank(path, _RANK_STATES, "the state")
    files = states or files_by_rank(path, _WEIGHTS, "class weights")
    backbones = [(not m[1], int(m[1] or 0), m[0]) for m in map(_BACKBONE.fullmatch, names_in(path)) if m]
    if not files or not (states or backbones):
        raise CheckpointError(
            f"{path} has neither checkpoint_gpu_<rank>.pt nor rank_<rank>_softmax_weight.pt with "
            "backbone.pth; give a folder with the files of all ranks, or the file of a backbone"
        )
    weights: list[Tensor] = []
    for file in files.values():
        content = weight = read_tensors(file)
        for name in ("state_dict_softmax_fc", "weight"):
            weight = weight.get(name) if isinstance(weight, dict) else weight
        if not isinstance(weight, Tensor):
            raise CheckpointError(f"{file} has no class weights (state_dict_softmax_fc); download it again")
        weights.append(weight)
        if states and file is files[0]:
            state = strip(unwrap({"backbone": content.get("state_dict_backbone")}))
    if not states:  # the file without the number of a step, or the last one
        state = read_state_dict(path / max(backbones)[2])[0]
    source = iresnet_source(state, str(path))
    rows = join_rows(weights, f"the class weights of {path}")
    share, left = divmod(rows.shape[0], len(weights))
    if [len(weight) for weight in weights] != [share + (rank < left) for rank in range(len(weights))]:
        raise CheckpointError(
            f"{path}: the shapes {[list(weight.shape) for weight in weights]!s:.200} do not fit the class "
            f"weights of {len(weights)} ranks; files are missing or from different runs"
        )
    source.rows[WEIGHT] = rows
    return source


def iresnet_source(state: Mapping[str, Tensor], where: str) -> Source:
    """Return the source for an iresnet's state dict; its number of blocks gives the depth."""
    blocks = tuple(
        len({name.split(".")[1] for name in state if name.startswith(f"layer{stage}.")})
        for stage in (1, 2, 3, 4)
    )
    depth = next((depth for depth, have in BLOCKS.items() if have == blocks), None)
    weight = state.get("fc.weight")
    named = {"conv1.weight", "prelu.weight", "layer4.0.bn3.weight", "features.weight"}
    if not named <= set(state) or depth is None or weight is None or len(weight.shape) != 2:
        raise CheckpointError(
            f"{where} is not an iresnet of insightface; name its network with --model, such as "
            "torchvision/resnet18, --emb_size and --image_shape, and pass --layout state_dict"
        )
    emb_size, inputs = weight.shape
    side = square_side(inputs // WIDTHS[-1], DOWNSAMPLING) if inputs % WIDTHS[-1] == 0 else None
    channels = state["conv1.weight"].shape[1] if len(state["conv1.weight"].shape) == 4 else 3
    shape = (channels, side, side) if side else None
    # insightface has the option, but trains without it.
    options: dict[str, object] = {"model.dropout": 0.0}
    network = Network(f"IResNet{depth}", emb_size, shape)
    return Source(LAYOUT, network, state, is_whole=True, options=options)
