"""A shuffle for disks and remote stores: it reads neighbouring samples at about the same time."""

from __future__ import annotations

import numpy as np

from plsc.data.permutation import permutation
from plsc.errors import OptionError
from plsc.seeds import hash_key

_BLOCKS, _POOL = 0, 1  # parts of the keys, so that the two draws are not related


def check_blocks(block_samples: int, pool_samples: int) -> None:
    """Raise OptionError if a pool would not hold a block."""
    if not 1 <= block_samples <= pool_samples:
        raise OptionError(
            f"data.block_samples is {block_samples} and data.pool_samples {pool_samples}; expected "
            "blocks of at least 1 sample, and a pool of one block or, better, tens of them"
        )


class BlockOrder:
    """Blocks of neighbouring samples in random order, and then pools of that order shuffled.

    The samples are cut into blocks of ``block_samples``, the last one maybe smaller. The blocks are
    permuted, laid end to end, and cut into pools of ``pool_samples`` positions; each pool is shuffled. So a
    pool reads pool_samples / block_samples blocks, and at most one more, and what is at a position is a
    function of (seed, epoch, position): any step can be resumed at.

    One pool, and sixteen bytes for each block, are held. Raises OptionError if a pool does not hold a block.
    """

    def __init__(self, num_samples: int, seed: int, block_samples: int, pool_samples: int) -> None:
        check_blocks(block_samples, pool_samples)
        self.num_samples = num_samples
        self.seed = seed
        self.block_samples = block_samples
        self.pool_samples = pool_samples
        self._epoch: int | None = None
        self._pool: tuple[int, np.ndarray] | None = None
        self._blocks = self._starts = np.empty(0, dtype=np.int64)

    def samples_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at positions 0..num_samples - 1 of an epoch's order, int64."""
        if epoch != self._epoch:
            self._start(epoch)
        found = np.empty(len(positions), dtype=np.int64)
        pools = positions // self.pool_samples
        for pool in np.unique(pools):
            chosen = pools == pool
            offsets = positions[chosen] - pool * self.pool_samples
            found[chosen] = self._samples_of(epoch, int(pool))[offsets]
        return found

    def _start(self, epoch: int) -> None:
        size, count = self.block_samples, -(-self.num_samples // self.block_samples)
        self._blocks = permutation(count, hash_key(self.seed, _BLOCKS), epoch)
        # All blocks but the last are of full size; what comes after it starts earlier.
        self._starts = np.arange(count, dtype=np.int64) * size
        self._starts[self._blocks.argmax() + 1 :] -= count * size - self.num_samples
        self._epoch, self._pool = epoch, None

    def _samples_of(self, epoch: int, pool: int) -> np.ndarray:
        if self._pool is None or self._pool[0] != pool:
            first = pool * self.pool_samples
            count = min(self.pool_samples, self.num_samples - first)
            key = hash_key(self.seed, _POOL, epoch)
            positions = first + permutation(count, key, pool)
            rows = np.searchsorted(self._starts, positions, side="right") - 1
            samples = self._blocks[rows] * self.block_samples + positions - self._starts[rows]
            self._pool = pool, samples
        return self._pool[1]
