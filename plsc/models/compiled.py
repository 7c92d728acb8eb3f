"""The backbone's training step through torch.compile, with a way back to the plain network."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plsc.storage.cache_folder import cache_folder

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_REASONS_SHOWN = 3


class CompiledNetwork(nn.Module):
    """A network that is compiled for the batches of training, and is itself for everything else.

    network: anything that is called as ``network(images, labels, is_train)``. sizes: the numbers of images
    that training gives it; a last smaller batch is computed by the plain network, since another size would
    take minutes to compile. say: is told once whether it was compiled, into how many pieces, and why not.
    backend: of torch.compile.

    What cannot be compiled (no C++ compiler, a construct that torch cannot translate) is computed by the
    plain network. Parameters and buffers are the network's own, under its name; keep `network` for
    evaluating and saving. Random numbers are those of the plain network.
    """

    def __init__(
        self,
        network: nn.Module,
        sizes: Collection[int],
        say: Callable[[str], None],
        backend: str = "inductor",
    ) -> None:
        super().__init__()
        self.network = network
        self._sizes = frozenset(sizes)
        self._proved: set[int] = set()
        self._say = say
        keep_compiled_code()
        # Only this backend has random numbers of its own.
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        compiled = torch.compile(network, dynamic=False, backend=backend, options=options)
        # Not as a module of this one, which would have every parameter twice.
        self._compiled: Callable[..., Tensor] | None = lambda *inputs: compiled(*inputs)

    def forward(self, input: Tensor, *others: Any) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]."""
        if self._compiled is None or not self.network.training or len(input) not in self._sizes:
            return self.network(input, *others)
        if len(input) in self._proved:
            return self._compiled(input, *others)
        return self._try(input, *others)

    def _try(self, input: Tensor, *others: Any) -> Tensor:
        """Compute a batch of a size that was not compiled before; on failure, and from then on, plainly."""
        if not self._proved:
            self._say("compiling the network: the first step takes a while, up to minutes")
        buffers = [buffer.detach().clone() for buffer in self.network.buffers()]
        random_state = torch.get_rng_state()
        counters = _counters()
        breaks = dict(counters)
        try:
            assert self._compiled is not None
            with _backward_at_once():
                output = self._compiled(input, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compilers below may throw
            trouble = error
        else:
            if not self._proved:
                found = [reason for reason in counters if counters[reason] > breaks.get(reason, 0)]
                self._say(describe_breaks(found))
            self._proved.add(len(input))
            return output
        # The part before a failure may have run.
        with torch.no_grad():
            for buffer, old in zip(self.network.buffers(), buffers, strict=True):
                buffer.copy_(old)
        torch.set_rng_state(random_state)
        output = self.network(
            input, *others
        )  # an error of the network's own comes again, as itself
        self._compiled = None
        self._say(f"the network is not compiled, and trains as it is: {_in_a_line(trouble)}")
        return output


def keep_compiled_code() -> None:
    """Have torch keep compiled code in a folder of our cache, unless $TORCHINDUCTOR_CACHE_DIR names another.

    torch's own place is a temporary folder, which a restart of the machine, or of a container, empties.
    """
    if not os.environ.get(_CACHE_VARIABLE):
        os.environ[_CACHE_VARIABLE] = str(cache_folder("compiled"))


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
    """Return torch's counts of the reasons for cuts, a Counter that goes on counting."""
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
