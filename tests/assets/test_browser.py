"""The Dagster UI as a person uses it, in headless Chromium: open a lineage, materialize, find the metric and the picture."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.assets.workspace import Workspace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MINUTES = 60_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (.ci/run installs it)"),
]


@pytest.fixture
def server(bench: Workspace, tmp_path: Path) -> Iterator[str]:
    """`assay ui` on a free port of loopback, stopped as Ctrl-C would."""
    (bench.experiment_places[0] / "tiny.yaml").unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "ASSAY_HOME": str(bench.home),
        "ASSAY_EXPERIMENTS": str(bench.experiment_places[0]),
        "ASSAY_EXECUTOR": "in_process",
    }
    program = [sys.executable, "-c", "from assay.definitions import main; main()", "ui", "--port", str(port)]
    with (tmp_path / "ui.log").open("w") as log:
        process = subprocess.Popen(
            program, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not _answers(url):
            assert process.poll() is None, (tmp_path / "ui.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "ui.log").read_text()
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_materialize_from_the_lineage_and_find_the_metric_and_the_picture(server: str, bench: Workspace, tmp_path: Path):
    from playwright.sync_api import sync_playwright

    pictures = Path(os.environ.get("ASSAY_SCREENSHOTS", tmp_path))
    elsewhere: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1500, "height": 950})
        page.on(
            "request", lambda request: elsewhere.append(request.url) if not request.url.startswith((server, "data:", "blob:")) else None
        )

        page.goto(f"{server}/locations/assay/asset-groups/small/lineage", timeout=MINUTES)
        page.get_by_text("int2", exact=True).first.wait_for(timeout=MINUTES)  # the chain from the base is drawn
        page.screenshot(path=pictures / "lineage.png")
        page.get_by_role("button", name="Materialize all").click(timeout=MINUTES)
        page.get_by_text("Launched run").first.wait_for(timeout=MINUTES)
        _wait_for_success(server)

        page.goto(f"{server}/assets/small/facts/int2/divergence?view=overview", timeout=MINUTES)
        page.get_by_text("kl_mean_nats").first.wait_for(timeout=MINUTES)
        page.get_by_text("[Show Markdown]").first.click(timeout=MINUTES)
        image = page.locator("img[src^='data:image/png;base64']").first
        image.wait_for(timeout=MINUTES)
        assert image.evaluate("picture => picture.naturalWidth") > 200  # it is a picture, not a broken link
        page.screenshot(path=pictures / "asset.png", full_page=True)
        text = page.inner_text("body")
        assert "cached" in text
        assert "divergence" in text

        page.goto(f"{server}/runs", timeout=MINUTES)
        page.get_by_text("Success").first.wait_for(timeout=MINUTES)
        page.screenshot(path=pictures / "runs.png")
        browser.close()
    assert elsewhere == []  # nothing outside this machine is asked
    from assay.warehouse.database import connect
    from assay.warehouse.reads import experiment_table

    table: Any = experiment_table(connect(bench.facts.root), experiment="small")
    assert table["kl_mean_nats"].null_count() == 0


def _wait_for_success(server: str) -> None:
    query = b'{"query": "{runsOrError(limit: 1) {... on Runs {results {status}}}}"}'
    deadline = time.monotonic() + 300
    while True:
        request = urllib.request.Request(f"{server}/graphql", data=query, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        if "SUCCESS" in text:
            return
        assert "FAILURE" not in text, text
        assert time.monotonic() < deadline, text
        time.sleep(2)
