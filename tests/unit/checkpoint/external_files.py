"""Write weights as other programs do: arcface_torch of insightface, PLSC 0.1 on Paddle 1.x."""

import json
import math
import struct
from pathlib import Path

import torch
from torch import nn

from plsc.models import build_model

PADDLE_TYPES = {torch.int64: 3, torch.float16: 4, torch.float32: 5, torch.float64: 6}


class PartialFC(nn.Module):
    """The class weights of one rank, sharded as in arcface_torch's PartialFC_V2."""

    def __init__(self, classes, emb_size, rank, ranks):
        super().__init__()
        local = classes // ranks + int(rank < classes % ranks)
        self.start = classes // ranks * rank + min(rank, classes % ranks)
        self.weight = nn.Parameter(torch.zeros(local, emb_size))


def random_network(name, emb_size, image_shape, seed=0):
    """Return a network with random weights and statistics, all different from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(name, emb_size, image_shape, 0.0)
    for key, value in model.state_dict().items():
        if key.endswith("num_batches_tracked"):
            value.fill_(7)
        elif key.endswith("running_var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.ndim == 1:
            value.normal_(0.3, 0.1, generator=generator)
        else:
            value.normal_(0, 1 / math.sqrt(value[0].numel()), generator=generator)
    return model


def save_arcface_torch(folder, rows, ranks, backbone):
    """Write what train_v2.py writes with save_all_states: checkpoint_gpu_<rank>.pt and model.pt."""
    folder.mkdir()
    for rank in range(ranks):
        module = PartialFC(len(rows), rows.shape[1], rank, ranks)
        part = slice(module.start, module.start + len(module.weight))
        module.weight.data.copy_(rows[part])
        optimizer = torch.optim.SGD(
            [{"params": backbone.parameters()}, {"params": module.parameters()}],
            lr=0.1,
            momentum=0.9,
        )
        optimizer.state[module.weight]["momentum_buffer"] = rows[part] * 2
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 10)
        checkpoint = {
            "epoch": 3,
            "global_step": 1234,
            "state_dict_backbone": backbone.state_dict(),
            "state_dict_softmax_fc": module.state_dict(),
            "state_optimizer": optimizer.state_dict(),
            "state_lr_scheduler": schedule.state_dict(),
        }
        torch.save(checkpoint, folder / f"checkpoint_gpu_{rank}.pt")
    torch.save(backbone.state_dict(), folder / "model.pt")
    return folder


def paddle_bytes(tensor):
    """Return a LoDTensor as SerializeToStream writes it."""
    description = b"\x08" + varint(PADDLE_TYPES[tensor.dtype])
    description += b"".join(b"\x10" + varint(size) for size in tensor.shape)
    head = struct.pack("<IQIi", 0, 0, 0, len(description))
    return head + description + tensor.contiguous().numpy().tobytes()


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def save_plsc1(folder, rows, ranks, *, bias=None, loss="arcface", backbone=None):
    """Write what PLSC 0.1 writes at the end of an epoch: one file per variable, and meta.json."""
    folder.mkdir()
    share = -(-len(rows) // ranks)
    for rank in range(ranks):
        part = slice(rank * share, (rank + 1) * share)
        name = f"dist@{loss}@rank@{rank:05d}"
        (folder / f"{name}.w_0").write_bytes(paddle_bytes(rows[part].t()))
        (folder / f"{name}.w_0_velocity_0").write_bytes(paddle_bytes(rows[part].t() * 2))
        if bias is not None:
            (folder / f"{name}.b_0").write_bytes(paddle_bytes(bias[part]))
    for name, tensor in ({} if backbone is None else paddle_names(backbone)).items():
        (folder / name).write_bytes(paddle_bytes(tensor))
    meta = {"pretrain_nranks": ranks, "emb_dim": rows.shape[1], "num_classes": len(rows)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def paddle_names(network):
    """Return the variables of a network in the order in which PLSC's resnet.py creates its layers."""
    counts, variables = {}, {}

    def add(kind, **tensors):
        number = counts[kind] = counts.get(kind, -1) + 1
        for suffix, tensor in tensors.items():
            variables[f"{kind}_{number}.{suffix}"] = tensor.detach()

    def conv(layer):
        add("conv2d", w_0=layer.weight)

    def norm(layer):
        add(
            "batch_norm",
            w_0=layer.weight,
            b_0=layer.bias,
            w_1=layer.running_mean,
            w_2=layer.running_var,
        )

    def prelu(layer):
        add("prelu", w_0=layer.weight)

    conv(network.stem[0])
    norm(network.stem[1])
    prelu(network.stem[2])
    for stage in network.stages:
        for block in stage:
            first, conv1, norm1, slope, conv2, norm2 = block.residual
            norm(first)
            conv(conv1)
            norm(norm1)
            prelu(slope)
            conv(conv2)
            norm(norm2)
            if isinstance(block.shortcut, nn.Sequential):
                conv(block.shortcut[0])
                norm(block.shortcut[1])
    norm(network.neck.norm)
    add("fc", w_0=network.neck.fc.weight.t(), b_0=network.neck.fc.bias)
    norm(network.neck.norm_out)
    return variables


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
