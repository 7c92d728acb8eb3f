"""Marks in the code of a training step: which part of it runs now. They cost nothing unless somebody records.

    with mark(Part.COPY):
        images = batch.input(device)

What is marked inside another part has its time to itself, so that the parts of a step add up to the step. A
recorder hears of the marks of the thread that began to record, and of no other thread's.
"""

from __future__ import annotations

import enum
import threading
from contextlib import ContextDecorator, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Part(enum.Enum):
    """The parts of a step, as a table shows them: what, and which kind of it."""

    DATA = "data"
    COPY = "copy to device"
    FORWARD = "backbone: forward"
    BACKWARD = "backbone: backward"
    HEAD = "head: target and loss"
    HEAD_PASSES = "head: pass over the rows"
    HEAD_BACKWARD = "head: backward"
    HEAD_ROWS = "head: update of the rows"
    GATHER = "communication: gathering the batch"
    REDUCE = "communication: sums of the head"
    SCATTER = "communication: embedding gradient"
    GRADIENTS = "communication: gradient sum, not hidden"
    BATCH_NORM = "communication: batch norm"
    CONTROL = "communication: agreeing"
    CLIPPING = "optimizer: clipping, unscaling"
    OPTIMIZER = "optimizer: update"
    LOGGING = "logging"
    OTHER = "other"

    @property
    def group(self) -> str:
        """What the parts of one kind have in common: ``head``."""
        return self.value.partition(":")[0]


class Recorder(Protocol):
    """Hears which part begins and ends."""

    def enter(self, part: Part) -> None:
        """A part begins inside the one that is open."""
        ...

    def switch(self, part: Part) -> None:
        """The open part ends and another one begins in its place; from any thread."""
        ...

    def leave(self) -> None:
        """The open part ends; the one around it goes on."""
        ...


class _OfThread(threading.local):
    recorder: Recorder | None = None


_HERE = _OfThread()


class mark(ContextDecorator):  # noqa: N801 - reads as the statement that it is, as contextlib's do
    """Says that the block, or the function that it decorates, is a part of the step."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __enter__(self) -> None:
        recorder = _HERE.recorder
        if recorder is not None:
            recorder.enter(self.part)

    def __exit__(self, *error: object) -> None:
        recorder = _HERE.recorder
        if recorder is not None:
            recorder.leave()


@contextmanager
def no_recorder() -> Iterator[None]:
    """Let nobody hear the marks of this thread in the block."""
    before = set_recorder(None)
    try:
        yield
    finally:
        set_recorder(before)


def set_recorder(recorder: Recorder | None) -> Recorder | None:
    """Have a recorder, or none, hear the marks of this thread; return the one before."""
    before, _HERE.recorder = _HERE.recorder, recorder
    return before


def mark_backward(embeddings: Tensor) -> None:
    """Tell apart what backward() does: the head, the backbone, the wait for the gradients' sum.

    embeddings: what the backbone gave and the head took. backward() is to be inside
    ``mark(Part.HEAD_BACKWARD)``.
    """
    recorder = _HERE.recorder
    if recorder is None or not embeddings.requires_grad:
        return

    def backbone_begins(_: Any) -> None:
        recorder.switch(Part.BACKWARD)
        # Callbacks run when all gradients are there, in the order in which they were queued. DDP queues its
        # own, which waits for the sum over the ranks, once the last gradient is ready: after this one.
        from torch.autograd import Variable

        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: recorder.switch(Part.GRADIENTS))

    embeddings.register_hook(backbone_begins)
