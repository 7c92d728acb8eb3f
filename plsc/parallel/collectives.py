"""The sharding of classes over ranks, collectives for batches of different sizes, copies, trace spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "plsc: "  # of the phases of a step, as torch.profiler shows them


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a block, or a decorated function, for torch.profiler.

    Takes one microsecond without a profiler; `record_function` takes six.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(PREFIX + name):
            yield
    else:
        yield


# PyTorch 2.14 renamed both, and warns of the old names.
IS_RENAMED = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if IS_RENAMED else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if IS_RENAMED else "reduce_scatter_tensor"


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks, which have one shape, into a tensor, in rank order."""
    getattr(dist, ALL_GATHER)(gathered, mine, group=group)


def gather_sizes(rows: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """Return the number of rows of every rank."""
    if group is None:
        return [rows]
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    mine = torch.tensor([rows], dtype=torch.int64, device=device)
    with span("gather batch"):
        all_gather(sizes, mine, group)
    return sizes.tolist()


def gather_rows(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks [sum(sizes), ...], in rank order, on every rank. Not differentiable."""
    if group is None:
        return tensor
    largest = max(sizes)  # the collective needs equal sizes: pad smaller blocks
    gathered = tensor.new_empty((len(sizes) * largest, *tensor.shape[1:]))
    mine = _pad_rows(tensor, largest)
    with span("gather batch"):
        all_gather(gathered, mine, group)
    if min(sizes) == largest:
        return gathered
    blocks = gathered.split(largest)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def gather_together(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks, each [R, ...] on every rank, by one collective. Not differentiable."""
    if group is None:
        return [tensor[None] for tensor in tensors]
    # As bytes, so that tensors of several types travel together.
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    gathered = gather_rows(torch.cat(parts)[None], [1] * group.size(), group)
    columns = gathered.split([len(part) for part in parts], dim=1)
    return [
        # A copy begins at an address that is aligned for any type.
        column.contiguous().view(tensor.dtype).view(-1, *tensor.shape)
        for column, tensor in zip(columns, tensors, strict=True)
    ]


def send_rows(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send each rank the rows of its own batch; return what all ranks sent, [ranks, sizes[rank], ...].

    tensor: [sum(sizes), ...] on every rank. Not differentiable.
    """
    if group is None:
        return tensor[None]
    mine, ranks = sizes[group.rank()], len(sizes)
    received = tensor.new_empty((ranks * mine, *tensor.shape[1:]))
    with span("gather batch"):
        dist.all_to_all_single(received, tensor.contiguous(), [mine] * ranks, sizes, group=group)
    return received.view(ranks, mine, *tensor.shape[1:])


class ScatteredSum:
    """An asynchronous reduce-scatter (sum) of rows.

    tensor: [sum(sizes), ...] on every rank. Rank r receives the sum of the sizes[r] rows of its own batch.
    """

    def __init__(self, tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> None:
        self._work: dist.Work | None = None
        if group is None:
            self._mine = tensor
            return
        largest, rank = max(sizes), group.rank()
        blocks = tensor
        if min(sizes) < largest:  # as in gather_rows
            blocks = torch.cat([_pad_rows(block, largest) for block in tensor.split(sizes)])
        padded = tensor.new_empty((largest, *tensor.shape[1:]))
        self._sent = blocks  # must stay alive until the collective has finished
        self._work = getattr(dist, REDUCE_SCATTER)(padded, blocks, group=group, async_op=True)
        self._mine = padded[: sizes[rank]]

    def wait(self) -> Tensor:
        """Wait for the collective, and return the rows [sizes[rank], ...]."""
        if self._work is not None:
            with span("scatter embedding gradient"):
                self._work.wait()
            self._work = None
            del self._sent
        return self._mine


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add the tensors of all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        with span("sum over ranks"):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def max_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the element-wise maximum over all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        with span("sum over ranks"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - len(tensor)
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def class_range(class_num: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return ``(start, stop)``, the classes of ``rank`` out of ``ranks``; may be empty.

    Rank r has [min(C, r k), min(C, (r + 1) k)) with k = ceil(C / R), exactly as DTensor's ``Shard(0)``.
    """
    rows = -(-class_num // ranks)
    return min(class_num, rank * rows), min(class_num, (rank + 1) * rows)


def class_ranges(class_num: int, ranks: int) -> list[tuple[int, int]]:
    """Return the range of every rank, in rank order."""
    return [class_range(class_num, rank, ranks) for rank in range(ranks)]


# Copies between a GPU and host memory that do not stop the computation.

_PIECE = 2**26  # bytes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; a copy from the CPU to a GPU is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # A copy from pageable memory would wait for all kernels in the queue.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Arriving:
    """A tensor whose values arrive in page-locked memory; a tensor on the CPU is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the values and return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def host_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies in pageable memory.

    Those from a GPU come through page-locked pieces: while one arrives, the one before it is moved on.
    """
    copies: list[Tensor] = []
    coming: deque[tuple[Tensor, Arriving]] = deque()

    def move() -> None:
        target, piece = coming.popleft()
        target.copy_(piece.read())

    for tensor in tensors:
        # No huge pages: where the kernel has to create them first, the copy takes twice as long.
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        if not tensor.is_cuda:
            copies[-1].copy_(tensor)
            continue
        count = max(1, _PIECE // tensor.element_size())
        parts = copies[-1].view(-1).split(count), tensor.contiguous().view(-1).split(count)
        for target, piece in zip(*parts, strict=True):
            coming.append((target, Arriving(piece)))
            if len(coming) > 2:
                move()
    while coming:
        move()
    return copies
