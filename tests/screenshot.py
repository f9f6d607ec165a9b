"""Makes the picture of the page in the README: .venv/bin/python tests/screenshot.py (with the extra
`browser` and a Chromium).

The demo model serves mlx_blockpool/demo/five_agents.py, twice: the second time the agents go on
from where they were.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright
from server.conftest import BROWSERS
from server.processes import process, send

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "mlx_blockpool/server/watch/page/picture.png"
WIDTH, HEIGHT = 1440, 1000
MODEL = "demo"
# Requests at once that make a good picture.
RUNNING = 4


def talk(port: int, turns: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mlx_blockpool.cli",
            "demo",
            "--url",
            f"http://127.0.0.1:{port}",
            "--turns",
            str(turns),
        ]
    )


def take(tab: Any) -> None:
    """Wait until the page shows several running requests, and take its picture."""
    expect(tab.locator("#state")).to_have_text("live")
    while (
        min(tab.locator(f"{part} .chip-decode").count() for part in ("#running", "#agent-table"))
        < RUNNING
    ):
        time.sleep(0.02)
    tab.screenshot(path=PICTURE, clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})


def show(port: int) -> None:
    """Let the agents talk, and take the picture while they go on."""
    talk(port, 3).wait()
    send(port, "/v1/agents/planner/pin", {})
    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(f"http://127.0.0.1:{port}/")
        talking = talk(port, 6)
        take(tab)
        talking.wait()
        browser.close()


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as store,
        process(Path(MODEL), Path(store), "--preallocate") as (port, server),
    ):
        # The server's log is a pipe that somebody has to empty.
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        show(port)
        server.kill()
        drain.wait()
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
