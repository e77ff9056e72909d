"""A headless Chromium, driven by Selenium."""

import os
import shutil

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.keys import Keys

KEYS = {
    "ArrowRight": Keys.ARROW_RIGHT,
    "ArrowLeft": Keys.ARROW_LEFT,
    "Enter": Keys.ENTER,
    "Escape": Keys.ESCAPE,
}


class Browser:
    """One page of so many pixels. All network but the files that are opened is cut off."""

    def __init__(self, width=1200, height=800):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for argument in ("headless=new", "disable-gpu", "hide-scrollbars", "disable-dev-shm-usage"):
            options.add_argument(f"--{argument}")
        options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
        options.add_argument("--force-device-scale-factor=1")
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium has no sandbox for the superuser
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # with the path of the driver, Selenium looks for none to download
        self._driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        self.run = self._driver.execute_script
        self.close = self._driver.quit
        self.screenshot = self._driver.get_screenshot_as_png
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def command(self, name, **parameters):
        """A command of the DevTools protocol."""
        return self._driver.execute_cdp_cmd(name, parameters)

    def open(self, path):
        self._driver.get(path.as_uri())

    def settle(self):
        """Wait until the page is drawn as requested."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"
        self._driver.execute_async_script(script)

    def _actions_at(self, x, y, duration_ms=0):
        """Actions that begin with the pointer at a point of the window."""
        actions = ActionChains(self._driver, duration=duration_ms)
        actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        return actions

    def _perform(self, actions):
        actions.perform()
        self.settle()

    def move(self, x, y):
        self._perform(self._actions_at(x, y))

    def click(self, x, y):
        self._perform(self._actions_at(x, y).click())

    def drag(self, x, y, dx, dy):
        self._perform(self._actions_at(x, y, 50).click_and_hold().move_by_offset(round(dx), round(dy)).release())

    def wheel(self, x, y, delta):
        origin = ScrollOrigin.from_viewport(round(x), round(y))
        self._perform(ActionChains(self._driver).scroll_from_origin(origin, 0, delta))

    def press(self, *keys):
        self._perform(ActionChains(self._driver).send_keys(*(KEYS.get(key, key) for key in keys)))

    def prefer(self, scheme):
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def complaints(self):
        """Entries of the browser's console since the last call: errors of scripts and refused loads.

        Entries on the speed of reading pixels are about these tests alone, and left out.
        """
        return [entry for entry in self._driver.get_log("browser") if entry["source"] != "rendering"]
