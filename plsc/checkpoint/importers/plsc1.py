"""Read checkpoints of PLSC 0.1, saved by Paddle 1.x: a folder with one file per variable.

``dist@arcface@rank@00000.w_0`` [D, C_local] holds the class weights of a rank as columns (softmax: also
``.b_0`` [C_local]), ``meta.json`` the counts; the momentum, ``..._velocity_0``, is not read. The backbone's
layers are numbered per kind in the order of creation: ``conv2d_0.w_0``, ``batch_norm_0.{w_0,b_0,w_1,w_2}``,
``prelu_0.w_0``, ``fc_0.{w_0,b_0}``. https://github.com/PaddlePaddle/PLSC, plsc/models/dist_algo.py and
plsc/utils/parameter_converter.py of version 0.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.checkpoint.importers.source import (
    BIAS,
    WEIGHT,
    Network,
    Source,
    files_by_rank,
    join_rows,
    names_in,
    square_side,
)
from plsc.checkpoint.importers.tensor_files import read_paddle_file
from plsc.errors import CheckpointError
from plsc.models import build_model
from plsc.models.neck import DOWNSAMPLING
from plsc.models.resnet import DEPTHS
from plsc.storage.records import read_record

LAYOUT = "plsc1"
ROWS = re.compile(r"dist@([A-Za-z0-9_]+)@rank@\d{1,6}\.[wb]_0")
_LONGEST_META = 1 << 16
# Per kind of layer: Paddle's name, and Paddle's suffix for each of our suffixes.
_KINDS: dict[type[nn.Module], tuple[str, dict[str, str]]] = {
    nn.Conv2d: ("conv2d", {"weight": "w_0", "bias": "b_0"}),
    nn.PReLU: ("prelu", {"weight": "w_0"}),
    nn.Linear: ("fc", {"weight": "w_0", "bias": "b_0"}),
    nn.modules.batchnorm._BatchNorm: (
        "batch_norm",
        {"weight": "w_0", "bias": "b_0", "running_mean": "w_1", "running_var": "w_2"},
    ),
}


def read_plsc1(path: Path, given: Network) -> Source:
    """Read such a folder. given: the network, if it is not a ResNet of PLSC.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, or of inconsistent sizes.
    """
    loss, kind = _loss_type(path)
    rows = {}
    for key, part in ((WEIGHT, "w"), (BIAS, "b"))[: 2 if loss == "dist_softmax" else 1]:
        pattern = re.compile(rf"dist@{re.escape(kind)}@rank@(\d{{1,6}})\.{part}_0")
        files = files_by_rank(path, pattern, f"{part}_0 of the head")
        if tensors := [read_paddle_file(file).movedim(0, -1) for file in files.values()]:
            rows[key] = join_rows(tensors, f"the variable {key} of {path}")
    if WEIGHT not in rows or len(rows[WEIGHT].shape) != 2:
        raise CheckpointError(f"{path} has no class weights [D, classes] dist@{kind}@rank@<rank>.w_0")
    class_num, emb_size = rows[WEIGHT].shape
    _check_meta(path, class_num, emb_size, len(rows[WEIGHT].parts))
    network, backbone = _read_backbone(path, given, emb_size)
    notes = [] if backbone else ["no backbone found, only the head"]
    return Source(LAYOUT, network, backbone, bool(backbone), rows, loss_type=loss, notes=notes)


def _loss_type(path: Path) -> tuple[str, str]:
    matches = filter(None, map(ROWS.fullmatch, names_in(path)))
    kinds = sorted({match[1] for match in matches})
    if len(kinds) != 1:
        raise CheckpointError(
            f"{path}: expected files dist@<loss>@rank@<rank>.w_0 of one loss, not those of {kinds!s:.80}; "
            "files of paddle.save (.pdparams) are pickles and are not supported"
        )
    return ("dist_softmax" if kinds[0] == "softmax" else "dist_arcface"), kinds[0]


def _check_meta(path: Path, class_num: int, emb_size: int, ranks: int) -> None:
    """Compare with meta.json, if it exists; without it a missing last file cannot be detected."""
    if "meta.json" not in names_in(path):
        return
    file = path / "meta.json"
    meta = read_record(dict[str, Any], file, file, most=_LONGEST_META)
    found = {"num_classes": class_num, "emb_dim": emb_size, "pretrain_nranks": ranks}
    if wrong := [name for name in found if meta.get(name) != found[name]]:
        raise CheckpointError(
            f"{file} says {wrong[0]} {str(meta.get(wrong[0]))[:40]}, the files have {found[wrong[0]]}; are "
            "files missing?"
        )


def _read_backbone(path: Path, given: Network, emb_size: int) -> tuple[Network, dict[str, Tensor]]:
    """Return the network, and its tensors by our names. The many files are read at once."""
    names = set(names_in(path))
    convolutions = sum(re.fullmatch(r"conv2d_\d+\.w_0", name) is not None for name in names)
    if not convolutions and given.name is None:
        return Network(None, emb_size), {}
    network = given.or_else(_recognise(path, names, convolutions, emb_size))
    tensors: dict[str, Tensor] = {}
    for ours, theirs, is_matrix in _variables(network):
        if theirs in names:
            tensor = read_paddle_file(path / theirs)
            tensors[ours] = (tensor.t() if is_matrix else tensor).contiguous()
    return network, tensors


def _recognise(path: Path, names: set[str], convolutions: int, emb_size: int) -> Network:
    """Return which ResNet of PLSC this is, from its number of convolutions and its last layer."""
    for depth in DEPTHS:
        with torch.device("meta"):
            model = build_model(f"ResNet{depth}", emb_size)
        count = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
        if count == convolutions and {"fc_0.w_0", "conv2d_0.w_0"} <= names:
            stem = read_paddle_file(path / "conv2d_0.w_0").shape
            inputs = read_paddle_file(path / "fc_0.w_0").shape[0]
            width: Any = model.get_submodule("neck.norm").num_features
            side = square_side(inputs // width, DOWNSAMPLING) if inputs % width == 0 else None
            shape = (stem[1], side, side) if side and len(stem) == 4 else None
            return Network(f"ResNet{depth}", emb_size, shape)
    return Network(None, emb_size)


def _variables(network: Network) -> list[tuple[str, str, bool]]:
    """Return per variable our name, Paddle's name, and whether Paddle stores it transposed."""
    if network.name is None or network.emb_size is None or network.image_shape is None:
        raise CheckpointError(
            "the backbone is not a PLSC ResNet for square images; name the network with --model and "
            "--image_shape"
        )
    with torch.device("meta"):
        model = build_model(network.name, network.emb_size, network.image_shape)
    counts: dict[str, int] = {}
    variables = []
    for path, layer in model.named_modules():
        kind = next((names for layer_type, names in _KINDS.items() if isinstance(layer, layer_type)), None)
        if kind is None:
            continue
        name, suffixes = kind
        number = counts.setdefault(name, 0)
        counts[name] += 1
        for ours, theirs in suffixes.items():
            is_matrix = name == "fc" and ours == "weight"
            variables.append((f"{path}.{ours}", f"{name}_{number}.{theirs}", is_matrix))
    return variables
