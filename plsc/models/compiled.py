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


class CompiledNetwork(nn.Module):
    """A network that is compiled for the batches of training, and is itself for everything else.

    network: anything that is called as ``network(images, labels, is_train)``. sizes: the numbers of images
    that training gives it on this rank; a last smaller batch is computed by the plain network, since another
    size would take minutes to compile. world: the ranks that train together; rank 0 logs, once, whether the
    network was compiled, and why not. backend: of torch.compile.

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
        self._missing = set(sizes)
        self._is_agreed = False
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
        return (self._compiled if len(input) in self._sizes else self.network)(input, *others)

    def _try(self, input: Tensor, *others: Any) -> Tensor:
        """Compute a batch, compiled if its size is one for that; on failure, and from then on, plainly."""
        if self._missing == self._sizes:
            self._log("compiling the network: the first step takes a while, up to minutes")
        put_back = self._remember()
        output, trouble = self._compute(input, *others)
        failed, missing = self._world.agree_max(int(output is None), len(self._missing))
        if not failed:
            assert output is not None
            if not missing:
                self._is_agreed = True
                self._log("the network is compiled")
            return output
        put_back()  # the part before a failure may have run, or all of it, here
        self._compiled = None
        reasons = enumerate(self._world.all_gather_object(trouble))
        rank, reason = next((rank, text) for rank, text in reasons if text)
        where = f"rank {rank}: " if self._world.size > 1 else ""
        text = f"the network is not compiled, and trains as it is: {where}{reason}"
        self._log(text, logging.WARNING)
        # An error of the network itself is raised again here.
        return self.network(input, *others)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._world.is_main:
            logger.log(level, text)

    def _remember(self) -> Callable[[], None]:
        """Return what puts back the buffers and the states of random numbers as they are now."""
        buffers = [buffer.detach().clone() for buffer in self.network.buffers()]
        device = self._world.device
        state = torch.get_rng_state()
        device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

        def put_back() -> None:
            with torch.no_grad():
                for buffer, old in zip(self.network.buffers(), buffers, strict=True):
                    buffer.copy_(old)
            torch.set_rng_state(state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)

        return put_back

    def _compute(self, input: Tensor, *others: Any) -> tuple[Tensor | None, str]:
        """Return the embeddings, or None and why the compiled network does not give them."""
        if len(input) not in self._sizes:
            return self.network(input, *others), ""
        try:
            assert self._compiled is not None
            with _backward_at_once():
                output = self._compiled(input, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compilers below may throw
            lines = " ".join(str(error).splitlines()[:2])  # torch names the backend in the first
            return None, f"{type(error).__name__}: {lines}"[:300]
        self._missing.discard(len(input))
        return output, ""


def _backward_at_once() -> AbstractContextManager[Any]:
    """Compile backward together with forward, where a failure can still be answered."""
    from torch._functorch import config  # imported late: it takes seconds

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()
