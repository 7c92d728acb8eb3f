"""The page of `plsc data clean` in Debian's Chromium. PLSC_SHOTS=FOLDER keeps screenshots."""

import asyncio
import os
from pathlib import Path

import pytest

from plsc.clean.review import Part, Row, write_page
from plsc.data.sources import open_source
from tests import browser
from tests.images import write_dataset

pytest.importorskip("aiohttp", reason="aiohttp, which drives chromium, is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.BINARY is None, reason="chromium is not installed"),
]


def test_the_page_fits_its_window_and_requests_nothing(tmp_path):
    root = write_dataset(tmp_path / "set", classes=2, per_class=6)
    long = "<img src=http://127.0.0.1/x>" * 9
    broken = f"<img src=x>{'a' * 200}.png"
    (root / broken).write_bytes(b"no image")
    with (root / "label.txt").open("a") as file:
        file.write(f"{broken}\t2\n")
    source = open_source(root)
    rows = [Row(long, source, range(start, 13, 4)) for start in range(3)] + [Row("All", source, range(13))]
    part = Part("Many", long, [(1, long, rows)] * 9)
    write_page(tmp_path / "page.html", long, [long], [part, part])

    async def main():
        async with browser.opened((tmp_path / "page.html").as_uri(), tmp_path / "profile") as page:
            await page.until("document.readyState === 'complete'")
            assert await page.js("[...document.images].every(i => i.naturalWidth === 96)")
            for width in (500, 1280):
                for dark in (False, True):
                    await page.size(width, dark=dark)
                    assert await page.js("document.documentElement.scrollWidth") <= width
                    if shots := os.environ.get("PLSC_SHOTS"):
                        name = f"clean-{width}-{'dark' if dark else 'light'}.png"
                        await page.screenshot(Path(shots) / name)
            await page.js("document.querySelectorAll('details')[1].open = false")
            await page.js("document.querySelectorAll('nav a')[1].click()")
            await page.until("document.querySelectorAll('details')[1].open")
            assert not page.problems
            assert all(url.startswith(("file:", "data:")) for url in page.urls)

    asyncio.run(main())
