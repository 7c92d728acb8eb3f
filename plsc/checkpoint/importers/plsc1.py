"""Read checkpoints of PLSC 0.1, saved by Paddle 1.x: a folder with one file per variable.

``dist@arcface@rank@00000.w_0`` [D, C_local] holds the class weights of a rank as columns (softmax: also
``.b_0`` [C_local]), ``..._velocity_0`` their momentum, ``meta.json`` the counts. The backbone's layers are
numbered per kind in the order of creation: ``conv2d_0.w_0``, ``batch_norm_0.{w_0,b_0,w_1,w_2}``,
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
    BIAS_MOMENTUM,
    WEIGHT,
    WEIGHT_MOMENTUM,
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
_ROWS = re.compile(r"dist@([A-Za-z0-9_]+)@rank@(\d{1,6})\.([wb])_0(_velocity_0)?")
_VELOCITY = "_velocity_0"
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


def is_plsc1(path: Path) -> bool:
    """Return whether a folder has class weights with these names; their content is not read."""
    return path.is_dir() and any("dist@" in name and "@rank@" in name for name in names_in(path))


def read_plsc1(path: Path, given: Network) -> Source:
    """Read such a folder. given: the network, if it is not a ResNet of PLSC.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, or of inconsistent sizes.
    """
    loss, kind = _loss_type(path)
    rows = {}
    for key, part, velocity in (
        (WEIGHT, "w", ""),
        (WEIGHT_MOMENTUM, "w", _VELOCITY),
        (BIAS, "b", ""),
        (BIAS_MOMENTUM, "b", _VELOCITY),
    ):
        pattern = re.compile(rf"dist@{re.escape(kind)}@rank@(\d{{1,6}})\.{part}_0{velocity}")
        files = files_by_rank(path, pattern, f"{part}_0{velocity} of the head")
        tensors = [read_paddle_file(file) for file in files.values()]
        if tensors:
            dimensions = 2 if part == "w" else 1
            for file, tensor in zip(files.values(), tensors, strict=True):
                if tensor.ndim != dimensions:
                    raise CheckpointError(
                        f"{file} has the shape {list(tensor.shape)}; expected {dimensions} dimensions"
                    )
            rows[key] = join_rows([t.t() for t in tensors], f"the variable {key} of {path}")
    if WEIGHT not in rows:
        raise CheckpointError(f"{path} has no class weights dist@{kind}@rank@<rank>.w_0")
    class_num, emb_size = rows[WEIGHT].shape
    _check_meta(path, class_num, emb_size, len(rows[WEIGHT].parts))
    notes = _drop_partial(path, rows)
    if (path / "meta.pickle").exists():
        notes.append("meta.pickle was not read, because a pickle can run code")
    network, backbone, momentum = _read_backbone(path, given, emb_size)
    if not backbone:
        notes.append("no backbone found, only the head")
    if loss != "dist_softmax":
        rows.pop(BIAS, None)
        rows.pop(BIAS_MOMENTUM, None)
    return Source(LAYOUT, network, backbone, bool(backbone), rows, momentum, loss_type=loss, notes=notes)


def _loss_type(path: Path) -> tuple[str, str]:
    matches = [match for match in map(_ROWS.fullmatch, names_in(path)) if match]
    kinds = sorted({match[1] for match in matches})
    if len(kinds) != 1:
        found = f"those of {', '.join(kinds)[:80]}" if kinds else "none"
        raise CheckpointError(
            f"{path}: expected files dist@<loss>@rank@<rank>.w_0 of one loss, found {found}; files of "
            "paddle.save (.pdparams) are pickles and are not supported"
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


def _drop_partial(path: Path, rows: dict[str, Any]) -> list[str]:
    """Remove state that does not cover all classes; return notes."""
    notes = []
    for key in (WEIGHT_MOMENTUM, BIAS, BIAS_MOMENTUM):
        wanted = rows[WEIGHT].shape[: 1 if key != WEIGHT_MOMENTUM else 2]
        if key in rows and rows[key].shape != wanted:
            if key == BIAS:
                raise CheckpointError(f"{path}: {rows[key].shape[0]} biases for {wanted[0]} classes")
            del rows[key]
            notes.append(f"{key} does not cover all classes; it starts at zero")
    return notes


def _read_backbone(
    path: Path, given: Network, emb_size: int
) -> tuple[Network, dict[str, Tensor], dict[str, Tensor]]:
    """Return the network, its tensors and their momentum by our names. The many files are read at once."""
    names = set(names_in(path))
    convolutions = sum(re.fullmatch(r"conv2d_\d+\.w_0", name) is not None for name in names)
    if not convolutions and given.name is None:
        return Network(None, emb_size), {}, {}
    network = given.or_else(_recognise(path, names, convolutions, emb_size))
    tensors: dict[str, Tensor] = {}
    momentum: dict[str, Tensor] = {}
    for ours, theirs, is_matrix in _variables(network):
        for name, into in ((theirs, tensors), (theirs + _VELOCITY, momentum)):
            if name in names:
                tensor = read_paddle_file(path / name)
                into[ours] = (tensor.t() if is_matrix else tensor).contiguous()
    return network, tensors, momentum


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
