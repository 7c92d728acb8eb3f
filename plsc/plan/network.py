"""What the ranks send in a step."""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT, _INDEX = 4, 8  # bytes of a float32, in which sums travel, and of an int64
# torch's DDP: the first bucket is small, so that its sum can start early.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    payload: bytes of the whole tensor, the gathered or the reduced one. sent: bytes that one rank sends
    when the ranks form a ring.
    """

    collective: str
    content: str
    payload: int
    sent: int


def all_gather(content: str, ranks: int, block: int) -> Transfer:
    """Each rank gives a block of so many bytes, and has all of them afterwards."""
    return Transfer("all-gather", content, ranks * block, (ranks - 1) * block)


def reduce_scatter(content: str, ranks: int, block: int) -> Transfer:
    """Each rank gives as many blocks as there are ranks, and has the sum of one."""
    return Transfer("reduce-scatter", content, ranks * block, (ranks - 1) * block)


def all_reduce(content: str, ranks: int, payload: int) -> Transfer:
    """Each rank gives a tensor and has the sum of all."""
    return Transfer("all-reduce", content, payload, 2 * (ranks - 1) * -(-payload // ranks))


def head_transfers(sizes: list[int], d: int, embedding_bytes: int) -> tuple[Transfer, ...]:
    """Return the collectives of a head's step; equal blocks move, so smaller ones are padded.

    sizes: samples of each rank; d: numbers in an embedding, of embedding_bytes each.
    """
    ranks, most = len(sizes), max(sizes)
    if ranks == 1:
        return ()
    return (
        all_gather("batch sizes", ranks, _INDEX),
        all_gather("labels", ranks, most * _INDEX),
        all_gather("embeddings", ranks, most * d * embedding_bytes),
        all_reduce("two sums a sample", ranks, 2 * sum(sizes) * _FLOAT),
        reduce_scatter("embedding gradient", ranks, most * d * _FLOAT),
    )


def backbone_transfers(ranks: int, gradients: int, shards: int = 1) -> tuple[Transfer, ...]:
    """Return the collectives that sum the backbone's gradients, in buckets; the last one comes last.

    gradients: their bytes. shards: of how many ranks each has a part of the parameters (FSDP): these are
    gathered for forward and backward, the gradients scattered, and summed over the copies.
    """
    if ranks == 1:
        return ()
    if shards > 1:
        block = -(-gradients // shards)
        found = [all_gather("parameters", shards, block)] * 2
        found.append(reduce_scatter("backbone's gradients", shards, block))
        if ranks > shards:
            found.append(all_reduce("backbone's gradients", ranks // shards, block))
        return tuple(found)
    first = min(gradients, _FIRST_BUCKET)
    buckets = [first]
    while sum(buckets) < gradients:
        buckets.append(min(_BUCKET, gradients - sum(buckets)))
    return tuple(all_reduce("backbone's gradients", ranks, size) for size in buckets)
