"""The pages of `plsc serve` and `plsc data clean` in Chromium. PLSC_SHOTS=FOLDER keeps screenshots."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.clean.review import Part, Row, write_page
from plsc.data.sources import open_source
from tests import browser
from tests.images import photo, write_dataset
from tests.serving import export_model, serving

pytest.importorskip("fastapi", reason="plsc-torch[serve] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.BINARY is None, reason="chromium is not installed"),
]


async def check_size(page, name):
    """Check that the page fits its window; take screenshots."""
    for width in (500, 1280):
        for dark in (False, True):
            await page.size(width, dark=dark)
            assert await page.js("document.documentElement.scrollWidth") <= width
            if shots := os.environ.get("PLSC_SHOTS"):
                await page.screenshot(Path(shots) / f"{name}-{width}-{'dark' if dark else 'light'}.png")


async def visit(page, folder, noise):
    faces = sorted((folder / "faces/images").glob("*.png"))

    await page.until("!document.getElementById('login').hidden")  # the server has a key
    await page.js("document.getElementById('key').focus()")
    await page.call("Input.insertText", text="secret")
    await page.press("Enter")
    await page.until("document.getElementById('about').textContent.includes('8 values per embedding')")
    await page.until("document.getElementById('status').textContent === ''")
    await check_size(page, "start")

    await page.choose("#files", noise)
    await page.until("document.getElementById('verdict').textContent === 'Unknown'")
    await page.until(
        "[...document.querySelectorAll('#results img')].filter(i => i.naturalWidth).length === 6"
    )
    await check_size(page, "unknown")

    await page.js("document.getElementById('name').focus()")
    await page.call("Input.insertText", text="<b>Zoë</b>".replace("/", ""))
    await page.press("Tab")
    assert await page.js("document.activeElement.textContent") == "Enrol"
    await page.press("Enter")
    await page.until("document.getElementById('verdict').textContent === 'Found: <b>Zoë<b>'")
    await page.until("document.getElementById('count').textContent === '1'")
    await page.js("document.querySelector('#enrolled summary').focus()")
    await page.press("Enter")
    await page.until("document.querySelectorAll('#entries img')[0]?.naturalWidth === 16")
    await check_size(page, "found")

    await page.js("document.querySelector('#entries button').click()")
    await page.until("document.getElementById('verdict').textContent === 'Unknown'")
    assert await page.js("document.getElementById('count').textContent") == "0"

    for others, verdict in (((faces[0], faces[0]), "The same"), ((noise, faces[0]), "Different")):
        await page.choose("#files", *others)
        await page.until(f"document.getElementById('verdict').textContent === '{verdict}'")
        assert await page.js("document.getElementById('meaning').textContent.startsWith('Cosine similarity')")
    await check_size(page, "different")

    await page.js("document.getElementById('clear').click()")
    upright, plain = Image.open(faces[0]).resize((600, 800), Image.Resampling.NEAREST), folder / "upright.png"
    upright.save(plain)
    for orientation in range(1, 9):
        turned = folder / f"photo-{orientation}.png"
        turned.write_bytes(photo(upright, orientation, "PNG"))
        await page.choose("#files", plain, turned)
        await page.until(
            "document.getElementById('meaning').textContent.startsWith('Cosine similarity 1.000')"
        )
        await page.js("document.getElementById('clear').click()")
    await page.choose("#camera", turned)
    await page.until("document.getElementById('results').children.length === 6")
    assert page.problems == [one for one in page.problems if "401" in one or "favicon" in one]
    assert all(url.startswith(("http://127.0.0.1", "blob:", "data:")) for url in page.urls)


def test_a_visitor_searches_enrols_finds_deletes_and_compares(tmp_path):
    model = export_model(tmp_path)
    rng = np.random.default_rng(0)
    noise = tmp_path / "noise.png"
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(noise)

    async def main(port):
        async with browser.opened(f"http://127.0.0.1:{port}/", tmp_path / "profile") as page:
            await visit(page, tmp_path, noise)

    with serving(model, tmp_path / "s.sqlite", key="secret") as server:
        asyncio.run(main(server.port))


def test_the_page_of_clean_fits_its_window_and_requests_nothing(tmp_path):
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
            await check_size(page, "clean")
            assert not page.problems
            assert all(url.startswith(("file:", "data:")) for url in page.urls)

    asyncio.run(main())
