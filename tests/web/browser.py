"""A headless Chromium, steered over a pipe by its DevTools protocol: no driver, no library, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 300.0


def chromium() -> str:
    """Where it is; without it the test is skipped, in CI it fails."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is missing; apt-get install chromium")
        pytest.skip("needs chromium: apt-get install chromium")
    return found


class Browser:
    """One browser with one page.

    Attributes:
        troubles: What the page's console said that is no plain log: errors, warnings, exceptions.
        expected: Parts of those that a test causes; they may still come when it has ended.
    """

    def __init__(self, folder: Path, scheme: str = "light") -> None:
        self.troubles: list[str] = []
        self.expected: tuple[str, ...] = ()
        to_child, own_write = os.pipe()
        own_read, from_child = os.pipe()
        argv = [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE 127.0.0.1",
            "--hide-scrollbars", "--disable-background-networking", "--mute-audio", "about:blank",
        ]  # fmt: skip
        code = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", code, "bash", *argv], pass_fds=(to_child, from_child),
            env=os.environ | {"HOME": str(folder)}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._write, self._read = own_write, own_read
        self._rest, self._count, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.call(f"{name}.enable")
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, TimeoutError):
            self._send("Browser.close", {})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = self._send(method, params)
        for message in self._messages(PATIENCE_S):
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]  # type: ignore[no-any-return]
        raise TimeoutError(method)

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        return self._count

    def _messages(self, patience_s: float) -> Iterator[dict[str, Any]]:
        until = time.monotonic() + patience_s
        while True:
            while b"\0" not in self._rest:
                left = until - time.monotonic()
                if left <= 0 or not select.select([self._read], [], [], left)[0]:
                    return
                chunk = os.read(self._read, 1 << 20)
                assert chunk, "the browser has ended"
                self._rest += chunk
            whole, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(whole)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.troubles.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.troubles.append(f"{params['type']}: {[a.get('value', a.get('description')) for a in params['args']]}")
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            line = f"{params['entry']['text']} {params['entry'].get('url', '')}"
            if "ERR_NETWORK_CHANGED" not in line:  # the page's own errors only
                self.troubles.append(line)

    # -- the page

    def size(self, width: int, height: int = 1000, phone: bool = False) -> None:
        """The window's size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def go(self, url: str) -> None:
        """Open an address; the page may still be at work after that."""
        self.call("Page.navigate", url=url)

    def load(self, url: str, ready: str) -> None:
        """Open an address anew, until an expression is true.

        Once more where that takes too long: when an interface of this machine comes or goes, as in other tests,
        Chromium breaks off what it is loading (ERR_NETWORK_CHANGED), scripts too.
        """
        for last in (False, False, False, True):
            self.go("about:blank")
            self.go(url)
            try:
                self.until(ready, PATIENCE_S if last else 8.0)
                return
            except AssertionError:
                if last or self.troubles:
                    raise

    def run(self, code: str) -> Any:
        """The value of an expression in the page; a promise's once it is there."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, code: str, patience_s: float = PATIENCE_S) -> None:
        """Until an expression is true."""
        end = time.monotonic() + patience_s
        while not self.run(f"(async () => {{ try {{ return Boolean({code}); }} catch {{ return false; }} }})()"):
            late = time.monotonic() > end or any(line.startswith("exception") for line in self.troubles)
            assert not late, f"still not: {code}; {self.troubles}; {self.text()[:2000]}"
            time.sleep(0.03)

    def text(self) -> str:
        """Return the text of the page."""
        return str(self.run("document.body.innerText"))

    def press(self, key: str) -> None:
        """A key, down and up."""
        named = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, ""), "ArrowDown": (40, "")}
        code, text = named.get(key, (ord(key.upper()[0]), key))
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def mouse(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer there, and click."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def shot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        data = base64.b64decode(found["data"])
        if path is not None:
            path.write_bytes(data)
        return data

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": min(height, 4000), "scale": 1}}

    def metrics(self) -> dict[str, float]:
        """Chromium's own counters (Performance.getMetrics)."""
        return {m["name"]: m["value"] for m in self.call("Performance.getMetrics")["metrics"]}
