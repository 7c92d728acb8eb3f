"""The layouts of other programs' checkpoints: which files they have, and which network the tensors are of.

insightface's arcface_torch: ``checkpoint_gpu_<rank>.pt`` of PartialFC and PartialFC_V2 (train.py and
train_v2.py) has state_dict_backbone and state_dict_softmax_fc {weight [C_local, D]}. Older:
``rank_<rank>_softmax_weight.pt`` (or ``<rank>_softmax_weight.pt``) next to ``backbone.pth``. Rank r of R has
C // R consecutive classes, and one more if r < C % R. The state of the optimizer is not read.
https://github.com/deepinsight/insightface/tree/master/recognition/arcface_torch

PLSC 0.1, saved by Paddle 1.x: a folder with one file per variable.
``dist@arcface@rank@00000.w_0`` [D, C_local] holds the class weights of a rank as columns (softmax: also
``.b_0`` [C_local]), ``meta.json`` the counts; the momentum, ``..._velocity_0``, is not read. The backbone's
layers are numbered per kind in the order of creation: ``conv2d_0.w_0``, ``batch_norm_0.{w_0,b_0,w_1,w_2}``,
``prelu_0.w_0``, ``fc_0.{w_0,b_0}``. https://github.com/PaddlePaddle/PLSC, plsc/models/dist_algo.py and
plsc/utils/parameter_converter.py of version 0.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.checkpoint.tensor_files import (
    RowParts,
    join_rows,
    read_paddle_file,
    read_state_dict,
    read_tensors,
    strip,
    unwrap,
)
from plsc.errors import CheckpointError
from plsc.models import build_model
from plsc.models.resnet import BASIC_WIDTHS, DOWNSAMPLING, IRESNET_BLOCKS
from plsc.storage.regular import read_record

INSIGHTFACE, PLSC1 = "insightface", "plsc1"
WEIGHT, BIAS = "head.weight", "head.bias"
_RANK_STATES = re.compile(r"checkpoint_gpu_(\d{1,6})\.pth?")
_WEIGHTS = re.compile(r"(?:rank_)?(\d{1,6})_softmax_weight\.pth?")
INSIGHTFACE_FILE = re.compile(f"{_RANK_STATES.pattern}|{_WEIGHTS.pattern}")
_BACKBONE = re.compile(r"(\d*)_?backbone\.pth?|model\.pth?")
PLSC1_FILE = re.compile(r"dist@([A-Za-z0-9_]+)@rank@\d{1,6}\.[wb]_0")
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


@dataclass(frozen=True)
class Network:
    """The network that the weights belong to; None for unknown fields."""

    name: str | None = None
    emb_size: int | None = None
    image_shape: tuple[int, ...] | None = None

    def or_else(self, other: Network) -> Network:
        """Return this network; its unknown fields are taken from `other`."""
        return Network(
            self.name or other.name, self.emb_size or other.emb_size, self.image_shape or other.image_shape
        )


@dataclass
class Source:
    """Weights to import.

    Attributes:
        network: the fields that the files name.
        backbone: its tensors, by our names.
        is_whole: no backbone tensor may be missing.
        rows: class weights and biases, by checkpoint key.
        options: of the run, such as model.dropout.
        notes: for the user.
    """

    layout: str
    network: Network
    backbone: Mapping[str, Tensor]
    is_whole: bool
    rows: dict[str, RowParts] = field(default_factory=dict)
    loss_type: str = "dist_arcface"
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_insightface(path: Path) -> Source:
    """Read a folder of these files, or one file with a backbone's state dict.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, malicious, or of different sizes.
    """
    if not path.is_dir():
        return iresnet_source(read_state_dict(path, follow_links=True)[0], str(path))
    states = _files_by_rank(path, _RANK_STATES, "the state")
    files = states or _files_by_rank(path, _WEIGHTS, "class weights")
    backbones = [(not m[1], int(m[1] or 0), m[0]) for m in map(_BACKBONE.fullmatch, names_in(path)) if m]
    if not files or not (states or backbones):
        raise CheckpointError(
            f"{path} has neither checkpoint_gpu_<rank>.pt nor rank_<rank>_softmax_weight.pt with backbone.pth"
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
        shapes = [list(weight.shape) for weight in weights]
        raise CheckpointError(f"{path}: the shapes {shapes!s:.200} are not those of {len(weights)} ranks")
    source.rows[WEIGHT] = rows
    return source


def iresnet_source(state: Mapping[str, Tensor], where: str) -> Source:
    """Return the source for an iresnet's state dict; its number of blocks gives the depth."""
    blocks = tuple(
        len({name.split(".")[1] for name in state if name.startswith(f"layer{stage}.")})
        for stage in (1, 2, 3, 4)
    )
    depth = next((depth for depth, have in IRESNET_BLOCKS.items() if have == blocks), None)
    weight = state.get("fc.weight")
    named = {"conv1.weight", "prelu.weight", "layer4.0.bn3.weight", "features.weight"}
    if not named <= set(state) or depth is None or weight is None or len(weight.shape) != 2:
        raise CheckpointError(
            f"{where} is not an iresnet of insightface; pass --layout state_dict, --model, --emb_size and "
            "--image_shape"
        )
    emb_size, inputs = weight.shape
    side = math.isqrt(inputs // BASIC_WIDTHS[-1])  # of the final feature map
    channels = state["conv1.weight"].shape[1] if len(state["conv1.weight"].shape) == 4 else 3
    is_square = side and side * side * BASIC_WIDTHS[-1] == inputs
    shape = (channels, side * DOWNSAMPLING, side * DOWNSAMPLING) if is_square else None
    # insightface has the option, but trains without it.
    options: dict[str, object] = {"model.dropout": 0.0}
    network = Network(f"IResNet{depth}", emb_size, shape)
    return Source(INSIGHTFACE, network, state, is_whole=True, options=options)


def read_plsc1(path: Path, given: Network) -> Source:
    """Read such a folder. given: the network, whose name and image shape the files do not have.

    Raises:
        CheckpointError: files are missing, duplicated, damaged, or of inconsistent sizes.
    """
    loss, kind = _loss_type(path)
    rows = {}
    for key, part in ((WEIGHT, "w"), (BIAS, "b"))[: 2 if loss == "dist_softmax" else 1]:
        pattern = re.compile(rf"dist@{re.escape(kind)}@rank@(\d{{1,6}})\.{part}_0")
        files = _files_by_rank(path, pattern, f"{part}_0 of the head")
        if tensors := [read_paddle_file(file).movedim(0, -1) for file in files.values()]:
            rows[key] = join_rows(tensors, f"the variable {key} of {path}")
    if WEIGHT not in rows or len(rows[WEIGHT].shape) != 2:
        raise CheckpointError(f"{path} has no class weights [D, classes] dist@{kind}@rank@<rank>.w_0")
    class_num, emb_size = rows[WEIGHT].shape
    _check_meta(path, class_num, emb_size, len(rows[WEIGHT].parts))
    network, backbone = _read_backbone(path, given, emb_size)
    notes = [] if backbone else ["no backbone found, only the head"]
    return Source(PLSC1, network, backbone, bool(backbone), rows, loss_type=loss, notes=notes)


def _loss_type(path: Path) -> tuple[str, str]:
    matches = filter(None, map(PLSC1_FILE.fullmatch, names_in(path)))
    kinds = sorted({match[1] for match in matches})
    if len(kinds) != 1:
        raise CheckpointError(
            f"{path}: expected files dist@<loss>@rank@<rank>.w_0 of one loss, not those of {kinds!s:.80}"
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
        raise CheckpointError(f"{file}: {wrong[0]} is {meta.get(wrong[0])!r:.40}, not {found[wrong[0]]}")


def _read_backbone(path: Path, given: Network, emb_size: int) -> tuple[Network, dict[str, Tensor]]:
    """Return the network, and its tensors by our names. The many files are read at once."""
    names, network = set(names_in(path)), given.or_else(Network(None, emb_size))
    if "conv2d_0.w_0" not in names and given.name is None:
        return network, {}
    tensors: dict[str, Tensor] = {}
    for ours, theirs, is_matrix in _variables(network):
        if theirs in names:
            tensor = read_paddle_file(path / theirs)
            tensors[ours] = (tensor.t() if is_matrix else tensor).contiguous()
    return network, tensors


def _variables(network: Network) -> list[tuple[str, str, bool]]:
    """Return per variable our name, Paddle's name, and whether Paddle stores it transposed."""
    if network.name is None or network.emb_size is None or network.image_shape is None:
        raise CheckpointError("the files do not name the backbone; pass --model and --image_shape")
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


def _files_by_rank(folder: Path, pattern: re.Pattern[str], what: str) -> dict[int, Path]:
    """Return the files whose whole name matches, by rank (the pattern's first group).

    Raises CheckpointError if a rank has two files, or a rank below the highest has none.
    """
    matches = filter(None, map(pattern.fullmatch, names_in(folder)))
    files = sorted((int(match[1]), folder / match[0]) for match in matches)
    ranks = [rank for rank, _ in files]
    if ranks != [*range(len(ranks))]:
        raise CheckpointError(f"{folder} has {what} of the ranks {ranks}; expected each rank from 0 once")
    return dict(files)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(path.name for path in folder.iterdir())
