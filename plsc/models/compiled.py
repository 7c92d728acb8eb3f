"""The backbone's training step through torch.compile, with a way back to the plain network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plsc.parallel.world import World

logger = logging.getLogger(__name__)
_REASONS_SHOWN = 3


class CompiledNetwork(nn.Module):
    """A network that is compiled for the batches of training, and is itself for everything else.

    network: anything that is called as ``network(images, labels, is_train)``. sizes: the numbers of images
    that training gives it on this rank; a last smaller batch is computed by the plain network, since another
    size would take minutes to compile. world: the ranks that train together; rank 0 logs, once, whether the
    network was compiled, into how many pieces, and why not. backend: of torch.compile.

    What cannot be compiled (no C++ compiler, a construct that torch cannot translate) is computed by the
    plain network, on all ranks if that is so on one: they agree in each call of training, of which every
    rank makes as many, until all sizes are compiled everywhere. Parameters and buffers are the network's
    own, under its name; keep `network` for evaluating and saving. Random numbers are those of the plain
    network.
    """

    def __init__(
        self,
        network: nn.Module,
        sizes: Collection[int],
        world: World | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        super().__init__()
        self.network = network
        self._sizes = frozenset(sizes)
        self._proved: set[int] = set()
        self._is_agreed = False
        self._is_told = False
        self._world = world or World.single()
        # Only this backend has random numbers of its own.
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        compiled = torch.compile(network, dynamic=False, backend=backend, options=options)
        # Not as a module of this one, which would have every parameter twice.
        self._compiled: Callable[..., Tensor] | None = lambda *inputs: compiled(*inputs)

    def forward(self, input: Tensor, *others: Any) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]; in the first steps a collective."""
        if self._compiled is None or not self.network.training:
            return self.network(input, *others)
        if not self._is_agreed:
            return self._try(input, *others)
        if len(input) in self._proved:
            return self._compiled(input, *others)
        return self.network(input, *others)

    def _try(self, input: Tensor, *others: Any) -> Tensor:
        """Compute a batch, compiled if its size is one for that; on failure, and from then on, plainly."""
        put_back = self._remember()
        counters = _counters()
        before = dict(counters)
        output, trouble = self._compute(input, *others)
        missing = len(self._sizes - self._proved)
        has_failed, still_missing = self._world.agree_max(int(trouble is not None), missing)
        self._is_agreed = not still_missing
        if not has_failed:
            assert output is not None
            if self._proved and not self._is_told:
                self._is_told = True
                found = [reason for reason in counters if counters[reason] > before.get(reason, 0)]
                self._log(describe_breaks(found))
            return output
        put_back()  # the part before a failure may have run, or all of it, here
        self._compiled = None
        self._tell(trouble)
        # An error of the network itself is raised again here.
        return self.network(input, *others)

    def _remember(self) -> Callable[[], None]:
        """Return what puts back the buffers and the states of random numbers as they are now."""
        buffers = [buffer.detach().clone() for buffer in self.network.buffers()]
        is_cuda = self._world.device.type == "cuda"
        state = torch.get_rng_state()
        device_state = torch.cuda.get_rng_state(self._world.device) if is_cuda else None

        def put_back() -> None:
            with torch.no_grad():
                for buffer, old in zip(self.network.buffers(), buffers, strict=True):
                    buffer.copy_(old)
            torch.set_rng_state(state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, self._world.device)

        return put_back

    def _compute(self, input: Tensor, *others: Any) -> tuple[Tensor | None, Exception | None]:
        """Return the embeddings, or why the compiled network does not give them."""
        if len(input) not in self._sizes:
            return self.network(input, *others), None
        if not self._proved:
            self._log("compiling the network: the first step takes a while, up to minutes")
        try:
            assert self._compiled is not None
            with _backward_at_once():
                output = self._compiled(input, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compilers below may throw
            return None, error
        self._proved.add(len(input))
        return output, None

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._world.is_main:
            logger.log(level, text)

    def _tell(self, trouble: Exception | None) -> None:
        """Say why the network is not compiled, of the first rank that has a reason; a collective."""
        mine = None if trouble is None else _in_a_line(trouble)
        reasons = self._world.all_gather_object(mine)
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text is not None)
        where = f"rank {rank}: " if self._world.size > 1 else ""
        text = f"the network is not compiled, and trains as it is: {where}{reason}"
        self._log(text, logging.WARNING)


def describe_breaks(reasons: list[str]) -> str:
    """Return a line about the places where torch.compile had to cut a network."""
    if not reasons:
        return "the network is compiled in one piece"
    shown = "; ".join(_in_a_line(reason) for reason in reasons[:_REASONS_SHOWN])
    more = f"; and {len(reasons) - _REASONS_SHOWN} more" if len(reasons) > _REASONS_SHOWN else ""
    return (
        f"the network is compiled in pieces, which is slower than in one, cut for {len(reasons)} "
        f"reason{'s' * (len(reasons) > 1)} (torch's words): {shown}{more}"
    )


def _counters() -> Any:
    """Return torch's counts of the reasons for cuts, a Counter that keeps counting."""
    from torch._dynamo.utils import counters  # imported late: it takes seconds

    return counters["graph_break"]


def _backward_at_once() -> AbstractContextManager[Any]:
    """Compile backward together with forward, where a failure can still be answered."""
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()


def _in_a_line(reason: object) -> str:
    """Return what an exception, or torch's long explanation of a cut, says in its first line."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    kind = f"{type(reason).__name__}: " if isinstance(reason, BaseException) else ""
    return kind + " ".join(lines[:2])[:300]
