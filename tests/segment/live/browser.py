"""A headless Chromium, driven through its debugging pipe: no other program or library is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
    None,
)


class Browser:
    """A browser window with one page.

    Args:
        address: URL of the page.
        dark: whether the browser prefers dark colours.
        size: width and height of the window.
    """

    def __init__(self, address, dark=False, size=(1200, 800)):
        self.folder = tempfile.mkdtemp()
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def pipes():
            # the browser listens on 3 and answers on 4
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder}", f"--window-size={size[0]},{size[1]}", "about:blank"],
            pass_fds=(3, 4), preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self.session = 0, b"", None
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=media)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Page.navigate", url=address)

    def send(self, method, **parameters):
        """Send a DevTools command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._read, 1 << 16)
                if not chunk:
                    raise ConnectionError("the browser has ended")
                self._rest += chunk
            data, self._rest = self._rest.split(b"\0", 1)
            actual = json.loads(data)
            if actual.get("id") == self._number:
                assert "error" not in actual, actual
                return actual["result"]

    def run(self, script):
        """Return the value of an expression in the page."""
        actual = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in actual, actual["exceptionDetails"]
        return actual["result"].get("value")

    def wait(self, script, seconds=60):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"{script} is not true after {seconds} s"
            time.sleep(0.05)

    def drag(self, *points, button="left"):
        """Press at the first point, move over the others, and release."""

        def mouse(kind, point):
            buttons = {"left": 1, "right": 2}[button]
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=point[0],
                y=point[1],
                button=button,
                buttons=buttons,
                clickCount=1,
            )

        mouse("mousePressed", points[0])
        for point in points[1:]:
            mouse("mouseMoved", point)
        mouse("mouseReleased", points[-1])

    def key(self, key):
        """Press a key."""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def image_png(self):
        """Return a PNG of the window."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self.folder, ignore_errors=True)
