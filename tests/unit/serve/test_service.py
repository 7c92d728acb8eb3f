import asyncio
import threading

import pytest

from plsc.serve.service import Batcher, Busy


class Squares:
    """Squares numbers, when the test allows it; an item that is no number fails alone."""

    def __init__(self):
        self.batches = []
        self.may_run = threading.Event()

    def __call__(self, items):
        self.batches.append(items)
        self.may_run.wait()
        return [item * item if isinstance(item, int) else ValueError(item) for item in items]


def run(work, **options):
    squares = Squares()

    async def main():
        batcher = Batcher(squares, **{"largest": 4, "queue": 8, "timeout": 60, **options})
        try:
            return await work(squares, batcher)
        finally:
            squares.may_run.set()
            batcher.close()

    return asyncio.run(main()), squares.batches


def test_items_that_arrive_during_a_batch_are_the_next_batches_and_a_full_queue_refuses_more():
    async def work(squares, batcher):
        items = [*range(8), "x"]  # one runs, eight wait
        tasks = [asyncio.create_task(batcher.submit(item)) for item in items]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await batcher.submit(9)
        squares.may_run.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    (*results, failed), batches = run(work)
    assert results == [item * item for item in range(8)]
    assert isinstance(failed, ValueError)  # alone
    assert batches == [[0], [1, 2, 3, 4], [5, 6, 7, "x"]]


def test_an_item_that_waited_for_too_long_is_not_run():
    async def work(squares, batcher):
        tasks = [asyncio.create_task(batcher.submit(item)) for item in (1, 2)]
        await asyncio.sleep(0.05)
        squares.may_run.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    (first, late), batches = run(work, timeout=0.01)
    assert first == 1
    assert isinstance(late, Busy)
    assert batches == [[1]]
