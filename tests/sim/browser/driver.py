"""A headless Chromium through its own driver: WebDriver is HTTP and JSON, so that the standard library is enough."""

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.request

BROWSER, DRIVER = "chromium", "chromedriver"
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "ArrowDown": "\ue015", "Enter": "\ue007", "Escape": "\ue00c"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which WebDriver names elements, as its standard has it."""


class Browser:
    """One page of so many pixels. All network but the files that are opened is cut off."""

    def __init__(self, width=1200, height=800):
        assert shutil.which(BROWSER), f"{BROWSER} is not installed: run `make test-browser`"
        self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        line = next(line for line in self._driver.stdout if "started successfully on port" in line)
        self._base = "http://127.0.0.1:" + re.search(r"port (\d+)", line)[1]
        arguments = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        arguments += ["--host-resolver-rules=MAP * ~NOTFOUND", "--force-device-scale-factor=1"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium has no sandbox for the superuser
        options = {"binary": shutil.which(BROWSER), "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{session['sessionId']}"
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def close(self):
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            self._driver.stdout.close()

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def command(self, name, **parameters):
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, path):
        self._call("POST", "/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        return self._call("POST", "/execute/sync", {"script": script, "args": arguments})

    def settle(self):
        """Wait until what was asked for is drawn."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"
        self._call("POST", "/execute/async", {"script": script, "args": []})

    def _act(self, *actions):
        self._call("POST", "/actions", {"actions": actions})
        self.settle()

    def move(self, x, y, *then):
        """Bring the pointer to a point of the window, then do ``then``."""
        go = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [go, *then]})

    def click(self, x, y):
        self.move(x, y, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0})

    def drag(self, x, y, dx, dy):
        to = {"type": "pointerMove", "duration": 50, "x": dx, "y": dy, "origin": "pointer"}
        self.move(x, y, {"type": "pointerDown", "button": 0}, to, {"type": "pointerUp", "button": 0})

    def wheel(self, x, y, delta):
        turn = {"type": "scroll", "duration": 0, "x": round(x), "y": round(y), "deltaX": 0, "deltaY": delta}
        self._act({"type": "wheel", "id": "wheel", "actions": [{**turn, "origin": "viewport"}]})

    def press(self, *keys):
        strokes = []
        for key in keys:
            value = KEYS.get(key, key)
            strokes += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._act({"type": "key", "id": "keys", "actions": strokes})

    def focus(self, selector):
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self.run("arguments[0].focus()", {ELEMENT: element[ELEMENT]})

    def prefer(self, scheme):
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def screenshot(self):
        return base64.b64decode(self._call("GET", "/screenshot"))

    def pdf(self):
        return base64.b64decode(self._call("POST", "/print", {"orientation": "landscape"}))

    def complaints(self):
        """What the browser wrote to its console since the last call: errors of scripts and refused loads.

        What it says of the speed of reading pixels is about these tests alone.
        """
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry for entry in entries if entry["source"] != "rendering"]
