"""Random numbers: training's own are keyed; generators that people's code draws from are saved, each rank's.

Nothing of plsc depends on the state of a generator. But a network of the user's may draw from `random`,
numpy's or torch's global ones, and a resumed run is to draw what the uninterrupted one draws.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.data.batch import Batch, NamesOf
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError
from plsc.models.dropout import SampleNumbers
from plsc.parallel.world import World
from plsc.seeds import hash_key

LARGEST_STATE = 2**20  # bytes; it is about 30 thousand
_PYTHON, _NUMPY = 0, 1  # parts of the keys


def seed_generators(world: World, *key: int) -> None:
    """Seed ``random`` and ``numpy.random`` by a key and the rank; torch is seeded at each step."""
    random.seed(hash_key(*key, world.rank, _PYTHON))
    np.random.seed(hash_key(*key, world.rank, _NUMPY) % 2**32)


def seed_step(seed: int, step: int, part: int, world: World) -> None:
    """Seed torch's generators for a micro-batch of a step.

    The CPU's alike on all ranks and for every part, as the dropout layers need it, which tell samples apart
    by their numbers; a GPU's otherwise on each, for what a network draws there itself.
    """
    torch.manual_seed(hash_key(seed, step))
    if world.device.type == "cuda":
        torch.cuda.manual_seed(hash_key(seed, step, world.rank, part))


def number_samples(
    samples: SampleNumbers, batch: Batch, loader: Any, first_sample: int, device: torch.device
) -> Tensor | None:
    """Return the numbers of a batch's samples, int64 [b]; None if no layer asks.

    Their places in the dataset, or in the global batch of a generator reader: neither depends on the ranks.
    first_sample: of this rank's part of the dataset.
    """
    if samples.layers == 0:
        return None
    if isinstance(batch.names, NamesOf):
        numbers = torch.tensor(batch.names.samples, dtype=torch.int64) + first_sample
    elif isinstance(loader, ReaderLoader):
        numbers = loader.places(len(batch.labels))
    else:
        return None
    return numbers.to(device, non_blocking=True)


def pack_generators(device: torch.device) -> Tensor:
    """Return the state of this rank's global generators as JSON text, uint8 [n]."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def unpack_generators(packed: Tensor, device: torch.device) -> None:
    """Put the global generators in the state that `pack_generators` returned.

    A state of a GPU's generator is passed over on the CPU. Raises CheckpointError if it is no such state.
    """
    try:
        state = json.loads(bytes(packed.tolist()))
        version, words, gauss = state["python"]
        python = (version, tuple(words), gauss)
        name, keys, *rest = state["numpy"]
        if not 0 <= rest[0] <= len(keys):  # numpy would read there without a check
            raise ValueError(f"position {rest[0]} of {len(keys)}")
        numpy_state = (name, np.array(keys, dtype=np.uint32), *rest)
        torch_state = _bytes(state["torch"])
        random.Random().setstate(python)  # tried elsewhere first: all change, or none
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(torch_state)
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the random generators in the checkpoint is damaged: {error}"
        ) from error


def _bytes(text: Any) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
