"""RecordIO files of images: ``.rec`` and its ``.idx``."""

from __future__ import annotations

from collections.abc import Iterable

from plsc.data.sources.recordio import frame, pack_image
from plsc.storage.publish import publishing


def write_recordio(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write samples to a ``.rec`` file and its ``.idx``, local or remote; return their number.

    Keys count from 0. Raises DataError if a file exists, cannot be written, or a label is too large.
    """
    count = offset = 0
    idx = location.removesuffix(".rec") + ".idx"
    # The .rec is published first: alone it is whole, the .idx alone is nothing.
    with publishing(idx) as index_file, publishing(location) as file:
        for image, label in samples:
            record = frame(pack_image(image, label, count))
            file.write(record)
            index_file.write(b"%d\t%d\n" % (count, offset))
            offset += len(record)
            count += 1
    return count
