"""Random checkpoints for changes of classes, and the reference implementation: everything in memory."""

import json

import numpy as np
import torch

from plsc.checkpoint.manifest import DTYPES, HeadInfo, Manifest, TensorInfo, entry_of, shard_name, write_shard
from plsc.heads.weights import initial_rows
from tests.roles import role_of_key

SEED = 11


def make_tensors(rng, classes, centers, dtype, kind, is_sharded):
    """Return the class tensors of a head [C, ...], and tensors without classes."""

    def rows(*shape, dtype=torch.float32):
        return torch.from_numpy(rng.standard_normal((classes, *shape))).to(dtype)

    def small(low, high, shape, dtype):
        return torch.from_numpy(rng.integers(low, high, (classes, *shape))).to(dtype)

    dimension = 6
    shape = (dimension,) if centers == 1 else (centers, dimension)
    tensors = {"head.weight": rows(*shape, dtype=dtype)}
    if not is_sharded:
        tensors["head.bias"] = rows()
        tensors["momentum.head.weight"] = rows(*shape)
        tensors["momentum.head.bias"] = rows()
        tensors["optimizer.exp_avg.head.weight"] = rows(*shape)
    elif kind == "int8":
        tensors["rows.weight.momentum_buffer"] = small(-127, 127, shape, torch.int8)
        tensors["rows.weight.momentum_scale"] = rows(*shape[:-1], 1)
    elif kind == "adamw":
        tensors["rows.weight.exp_avg"] = rows(*shape, dtype=torch.bfloat16)
        tensors["rows.weight.exp_avg_sq"] = rows(*shape)
        tensors["rows.weight.steps"] = small(0, 99, shape[:-1], torch.int32)
    else:
        tensors["head.bias"] = rows()
        tensors["rows.weight.sum_of_squares"] = rows(*shape[:-1])
        tensors["rows.bias.sum_of_squares"] = rows()
    others = {
        "backbone.head.weight": torch.from_numpy(rng.standard_normal((classes, 3))),
        "backbone.count": torch.tensor(7),
        "backbone.empty": torch.zeros(0, 4),
        "momentum.backbone.head.weight": torch.from_numpy(rng.standard_normal((classes, 3))),
        "optimizer.step.head.weight": torch.tensor(3.0),
        "optimizer.columns.head.weight": torch.arange(float(classes + 1)),
        "head.margin.t": torch.tensor(0.25),
    }
    return tensors, others


def write_checkpoint(folder, tensors, others, ends, is_sharded=True):
    """Write a checkpoint whose file r has the class rows up to ends[r]; whole tensors in the first file."""
    folder.mkdir(parents=True)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
    classes = len(tensors["head.weight"])
    files, start = {}, 0
    for rank, stop in enumerate(ends):
        whole = {**others, **({} if is_sharded else tensors)} if rank == 0 else {}
        whole[f"rank{rank}.backbone.mean"] = torch.arange(4.0) + rank
        entries = [entry_of(key, tensor, 0) for key, tensor in whole.items()]
        if is_sharded:
            entries += [entry_of(key, t[start:stop], start) for key, t in tensors.items()]
        name = shard_name(rank)
        files[name] = write_shard(folder / name, entries)
        start = stop
    infos = {
        key: TensorInfo(tuple(t.shape), names[t.dtype], kind, role_of_key(key))
        for kind, part in ((is_sharded, tensors), (False, others))
        for key, t in part.items()
    }
    for rank in range(len(ends)):
        key = f"rank{rank}.backbone.mean"
        infos[key] = TensorInfo((4,), "float32", False, role_of_key(key))
    starts = [0, *ends[:-1]]
    ranges = list(zip(starts, ends, strict=True)) if is_sharded else [(0, classes)]
    manifest = Manifest(
        plsc_version="0",
        step=30,
        epoch=2,
        step_in_epoch=3,
        world_size=len(ends),
        emb_size=6,
        heads={"": HeadInfo(classes, ranges, "dist_arcface", 40)},
        options={"train": {"seed": SEED}, "head": {"class_num": None}},
        scalars={"metrics": {"loss": 1.5}},
        tensors=infos,
        files=files,
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest


def grown(tensors, count):
    out = {}
    for key, tensor in tensors.items():
        new = torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype)
        if key == "head.weight":
            k = tensor.shape[1] if tensor.ndim == 3 else 1
            first, last = len(tensor) * k, (len(tensor) + count) * k
            drawn = initial_rows(SEED, 0, last, tensor.shape[-1], tensor.dtype)[first:]
            new = drawn.view(count, *tensor.shape[1:])
        out[key] = torch.cat([tensor, new])
    return out


def reordered(tensors, order):
    return {key: tensor[torch.tensor(list(order))] for key, tensor in tensors.items()}


def merged(tensors, pairs):
    """pairs: from -> to."""
    out = {key: tensor.clone() for key, tensor in tensors.items()}
    stay = [c for c in range(len(tensors["head.weight"])) if c not in pairs]
    for target in set(pairs.values()) if tensors["head.weight"].ndim == 2 else ():
        group = [target, *(source for source, to in pairs.items() if to == target)]
        weight = tensors["head.weight"].double()
        out["head.weight"][target] = mean_of(weight[group]).to(out["head.weight"].dtype)
        if "head.bias" in tensors:
            out["head.bias"][target] = tensors["head.bias"][group].double().mean().float()
    return reordered(out, stay)


def mean_of(group):
    """group: [n, D], the remaining class first."""
    unit = group / group.norm(dim=1, keepdim=True)
    mean = unit.mean(dim=0)
    return mean / mean.norm() * group.norm(dim=1).mean()


def class_map(folder):
    """Return the new number of each old class, -1 if it has none, from classes.tsv."""
    pairs = np.loadtxt(folder / "classes.tsv", np.int64, ndmin=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    numbers = np.full(manifest["lineage"][-1]["classes_before"], -1)
    numbers[pairs[:, 0]] = pairs[:, 1]
    return numbers


def ends_of(rng, classes, files):
    """Return uneven ends of the rows of each file, the last one `classes`."""
    cuts = np.sort(rng.integers(1, classes + 1, files - 1))
    return [*cuts.tolist(), classes]
