"""torch.compile for training, with a fallback to the uncompiled network."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plsc.inputs import Input, first_tensor
from plsc.parallel.world import World
from plsc.storage.cache import cache_folder

logger = logging.getLogger(__name__)


class CompiledNetwork(nn.Module):
    """A network that is compiled for training batches, and uncompiled for everything else.

    If compilation fails on one rank (no C++ compiler, an unsupported construct), all ranks use the uncompiled
    network. The ranks exchange this in each training call until all sizes are compiled on all ranks; every
    rank must make the same number of calls. Rank 0 logs once whether the network is compiled.

    Use `network` for evaluation and saving: it holds the parameters and buffers. Random numbers equal those
    of the uncompiled network.

    Args:
        network: called as ``network(images, labels, is_train)``.
        sizes: the batch sizes to compile for on this rank. Other sizes, such as a smaller last batch, use the
            uncompiled network, because each size takes minutes to compile.
        world: the ranks that train together.
        backend: of torch.compile.
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
        self._is_compiled_everywhere = False
        self._world = world or World.single()
        # By default inductor runs what it finds in a folder of /tmp that any user could have created.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
        # Only inductor has its own random numbers.
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        compiled = torch.compile(network, dynamic=False, backend=backend, options=options)
        # A closure, because a submodule would register every parameter a second time.
        self._compiled: Callable[..., Tensor] | None = lambda *inputs: compiled(*inputs)

    def forward(self, input: Input, *others: Any) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]; a collective until all is compiled."""
        if self._compiled is None or not self.network.training:
            return self.network(input, *others)
        if not self._is_compiled_everywhere:
            return self._try_compiled(input, *others)
        return (self._compiled if _size(input) in self._sizes else self.network)(input, *others)

    def _try_compiled(self, input: Input, *others: Any) -> Tensor:
        """Compute a batch with the compiled network if possible; after a failure, disable compilation."""
        if self._missing == self._sizes:
            self._log("compiling the network: the first step may take minutes")
        restore = self._save_state()
        output, failure = self._compute(input, *others)
        failed, missing = self._world.all_reduce_max(int(output is None), len(self._missing))
        if not failed:
            assert output is not None
            if not missing:
                self._is_compiled_everywhere = True
                self._log("the network is compiled")
            return output
        restore()  # parts of the network may have run
        self._compiled = None
        reasons = enumerate(self._world.all_gather_object(failure))
        rank, reason = next((rank, text) for rank, text in reasons if text)
        where = f"rank {rank}: " if self._world.size > 1 else ""
        text = f"the network cannot be compiled and trains uncompiled: {where}{reason}"
        self._log(text, logging.WARNING)
        # Raises again if the network itself caused the failure.
        return self.network(input, *others)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._world.is_main:
            logger.log(level, text)

    def _save_state(self) -> Callable[[], None]:
        """Save buffers and random states; return a function that restores them."""
        buffers = [buffer.detach().clone() for buffer in self.network.buffers()]
        device = self._world.device
        state = torch.get_rng_state()
        device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

        def restore() -> None:
            with torch.no_grad():
                for buffer, old in zip(self.network.buffers(), buffers, strict=True):
                    buffer.copy_(old)
            torch.set_rng_state(state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)

        return restore

    def _compute(self, input: Input, *others: Any) -> tuple[Tensor | None, str]:
        """Return (embeddings, "") or (None, reason for the failure)."""
        if _size(input) not in self._sizes:
            return self.network(input, *others), ""
        try:
            assert self._compiled is not None
            with _compile_backward_eagerly():
                output = self._compiled(input, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers may raise anything
            lines = " ".join(str(error).splitlines()[:2])  # the first line names only the backend
            return None, f"{type(error).__name__}: {lines}"[:300]
        self._missing.discard(_size(input))
        return output, ""


def _size(input: Input) -> int:
    return len(first_tensor(input))


def _compile_backward_eagerly() -> AbstractContextManager[Any]:
    """Compile backward together with forward, while the fallback is still possible."""
    from torch._functorch import config  # imported here, because it takes seconds

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()
