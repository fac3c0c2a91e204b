"""A page in a real Chromium, headless, over its own protocol on a pipe: what goes wrong in it, its width, its look.

    with browser.opened(path, width=390, dark=True) as page:
        page.faults, page.evaluate("document.body.scrollWidth"), page.screenshot()

`browser.CHROMIUM` is None where there is none (Debian: apt-get install chromium).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# no sandbox: containers that tests run in let nobody make one, and the page is our own
_FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"


class Page:
    """An open page. faults: errors of scripts, others in the log, and every address that it asks the network for."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._unread, self._last = commands, answers, b"", 0
        self.faults: list[str] = []
        self._session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def wait_for(self, event: str) -> None:
        while (answer := self._next()).get("method") != event:
            self._note(answer)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser is gone"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(told["exceptionDetails"]["text"])
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.faults.append(told["entry"]["text"])
            case "Network.requestWillBeSent" if not told["request"]["url"].startswith(("file:", "data:")):
                self.faults.append(f"asks for {told['request']['url']}")


@contextmanager
def opened(path: Path, *, width: int = 1280, height: int = 844, dark: bool = False) -> Iterator[Page]:
    """The page at `path`, loaded, as a screen of this width shows it (below 600: a phone's)."""
    assert CHROMIUM is not None
    (to_read, commands), (answers, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser reads its commands from descriptor 3 and answers on 4
        words = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        try:
            page = Page(commands, answers)
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page._session = session
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            page.call("Emulation.setDeviceMetricsOverride", **screen)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            page.call("Page.navigate", url=path.resolve().as_uri())
            page.wait_for("Page.loadEventFired")
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
