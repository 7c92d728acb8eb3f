"""Time of a step of the backbone's optimizer: fused, foreach and for_loop in turn, in one process.

python benchmarks/optimizers.py [--model ResNet50] [--layout channels_last] [--optimizers sgd,adamw]

Steps update all parameters of a network. Prints the median time of each implementation and its ratio to
for_loop. The learning rates are 0, so parameters remain finite.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plsc.errors import OptionError
from plsc.models import build_model
from plsc.optim import OPTIMIZERS, build_optimizer

WAYS: dict[str, dict[str, object]] = {
    "for_loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def parameters_of(model: str, layout: str, device: torch.device) -> list[nn.Parameter]:
    """Return parameters with the shapes of the network, with gradients."""
    with torch.device("meta"):
        shapes = [p.shape for p in build_model(model).parameters()]
    parameters = []
    for shape in shapes:
        weights = torch.full(shape, 0.01, device=device)
        if layout == "channels_last" and weights.ndim == 4:
            weights = weights.to(memory_format=torch.channels_last)
        parameters.append(nn.Parameter(weights))
        parameters[-1].grad = torch.full_like(parameters[-1], 1e-3)
    return parameters


def measure(name: str, rounds: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step by implementation; those that torch lacks are omitted."""
    device = torch.device(args.device)
    built = {}
    for way, arguments in WAYS.items():
        groups = [{"params": parameters_of(args.model, args.layout, device)}]
        try:
            built[way] = build_optimizer(name, groups, 1e-9, arguments=arguments)
        except OptionError:
            continue
    times: dict[str, list[float]] = {way: [] for way in built}
    for turn in range(rounds + 2):
        for way, optimizer in built.items():
            _wait(device)
            began = time.perf_counter()
            optimizer.step()
            _wait(device)
            if turn >= 2:  # the first steps create the states
                times[way].append(time.perf_counter() - began)
    return {way: statistics.median(values) for way, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print a line for each optimizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--layout", default="contiguous", choices=("contiguous", "channels_last"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    args = parser.parse_args()
    with torch.device("meta"):
        count = sum(p.numel() for p in build_model(args.model).parameters())
    print(f"{args.model}, {count / 1e6:.1f} million parameters, {args.layout}, {args.device}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| optimizer | for_loop ms | foreach ms | fused ms | foreach/for_loop | fused/for_loop |")
    print("|---|---|---|---|---|---|")
    for name in args.optimizers.split(","):
        found = measure(name, args.rounds, args)
        shown = [f"{found[way] * 1e3:.1f}" if way in found else "" for way in WAYS]
        ratios = [
            f"{found[way] / found['for_loop']:.2f}" if way in found else "" for way in ("foreach", "fused")
        ]
        print(f"| {name} | {' | '.join([*shown, *ratios])} |", flush=True)


if __name__ == "__main__":
    main()
