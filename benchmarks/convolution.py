"""Time forward and backward pass of the convolutions of plsc and of torch, for several feature maps.

    python benchmarks/convolution.py --threads 2
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python benchmarks/convolution.py      # a CPU without matrix units

In bfloat16 on a CPU, channels last. Both run in one process and take turns for many rounds; the table has the
median of each round's ratio. "product" is the gradient of the weights as a matrix product, which plsc uses
for small outputs and which is forced here for every shape. The last column is what plsc.models.layers.Conv2d
uses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plsc.models.layers import Conv2d, weight_gradient

# images, channels, side, output channels, kernel, stride
SHAPES = [
    (128, 256, 2, 256, 3, 1),  # from the demo's network
    (128, 128, 4, 128, 3, 1),
    (128, 128, 4, 256, 3, 2),
    (128, 64, 8, 128, 3, 2),
    (128, 64, 8, 64, 3, 1),
    (128, 128, 4, 256, 1, 2),
    (64, 512, 7, 512, 3, 1),  # from ResNet18 at 112 x 112
    (64, 256, 14, 512, 3, 2),
    (64, 256, 14, 256, 3, 1),
    (64, 256, 14, 512, 1, 2),
    (64, 128, 28, 256, 3, 2),
    (16, 512, 7, 512, 3, 1),
]


def in_turn(ways: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each way in each round, after a warm-up round."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, mine in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if turn:
                mine.append(1000 * (time.perf_counter() - start))
    return times


def compare(shape: tuple[int, ...], rounds: int) -> str:
    """Return a row of the table."""
    images, channels, side, outputs, kernel, stride = shape
    padding = kernel // 2
    layer = Conv2d(channels, outputs, kernel, stride, padding, bias=False)
    layer = layer.bfloat16().to(memory_format=torch.channels_last)
    input = torch.randn(images, channels, side, side).bfloat16()
    input = input.to(memory_format=torch.channels_last).requires_grad_()
    output = layer(input)
    is_ours = type(output.grad_fn).__name__ == "_SmallMapConvolutionBackward"
    d_output = torch.randn_like(output)
    strides, paddings = (stride, stride), (padding, padding)
    seen = input.detach()

    def torchs(wanted: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            d_output, seen, layer.weight, None, strides, paddings, (1, 1), False, (0, 0), 1, wanted
        )
        return found

    with torch.no_grad():
        forward, to_input, theirs, ours = in_turn(
            [
                lambda: layer(seen),
                lambda: torchs((True, False, False)),
                lambda: torchs((False, True, False)),
                lambda: weight_gradient(seen, d_output, (kernel, kernel), strides, paddings),
            ],
            rounds,
        )
    ratio = statistics.median(one / other for one, other in zip(theirs, ours, strict=True))
    columns = [f"{statistics.median(times):.2f}" for times in (forward, to_input, theirs, ours)]
    name = f"{images} x {channels} x {side} x {side} to {outputs}, {kernel} x {kernel}, stride {stride}"
    return f"| {name} | {' | '.join(columns)} | {ratio:.2f} | {'product' if is_ours else 'torch'} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.threads} threads, {torch.backends.cpu.get_cpu_capability()}, ms (median)\n")
    print(
        "| convolution | forward | gradient of the input | of the weights: torch | product "
        "| torch / product | plsc uses |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        print(compare(shape, options.rounds), flush=True)


if __name__ == "__main__":
    main()
