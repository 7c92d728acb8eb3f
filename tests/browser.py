"""Drive Debian's Chromium over the DevTools protocol."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
from contextlib import asynccontextmanager

BINARY = shutil.which("chromium")
_SECONDS = 60


class Page:
    """A tab. Requests for other hosts, errors and messages of its console are collected."""

    def __init__(self, socket):
        self._socket = socket
        self._answers = {}
        self._number = 0
        self.problems = []
        self.urls = []

    async def read(self):
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Network.requestWillBeSent":
                self.urls.append(found["params"]["request"]["url"])
            elif found["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(found["params"]))

    async def call(self, method, **parameters):
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, _SECONDS)
        assert "error" not in answer, answer
        return answer["result"]

    async def js(self, expression):
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression):
        """Wait until an expression is true; elements that it names may not exist yet."""
        for _ in range(_SECONDS * 20):
            answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
            if answer["result"].get("value") is True:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expression}: {await self.js('document.body.innerText')}")

    async def choose(self, selector, *paths):
        """Choose files in an input."""
        root = await self.call("DOM.getDocument")
        node = await self.call("DOM.querySelector", nodeId=root["root"]["nodeId"], selector=selector)
        await self.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(path) for path in paths])

    async def press(self, key, text=""):
        """Press a key on the keyboard."""
        code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, ord(key[0].upper()))
        how = {"key": key, "windowsVirtualKeyCode": code, "text": text or ("\r" if key == "Enter" else "")}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **{k: v for k, v in how.items() if v})
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def size(self, width, height=900, dark=False):
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path):
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def opened(url, profile):
    """Open a page in a new browser."""
    import aiohttp

    command = [BINARY, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in process.stderr if "DevTools listening" in line)
        port = re.search(r":(\d+)/", line)[1]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                reader = asyncio.create_task(page.read())
                for domain in ("Page", "DOM", "Runtime", "Network", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=url)
                yield page
                reader.cancel()
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()
