"""The page in a real browser, and a page of another origin that tries to use the server. Skipped where there is none.

    python -m pytest -m slow tests/server/test_page.py

MLXRT_SCREENSHOTS=FOLDER keeps what it looked like (docs/img).
"""

import http.server
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxrt import EngineConfig

from .conftest import Server, running, wait_for

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_MS = 60_000
ANSWER = "Yes. **Three** lines:\n\n```python\nprint('hello')\n```\n\n- one\n- two"
THOUGHT = "<think>\nwhat could it be\n</think>\n\n"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with running(config=EngineConfig(chunk=64, reasoning_parser="think", tool_parser="hermes")) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served) -> Iterator:
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(served.url)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    context.close()
    assert problems == []


def keep(page, name: str) -> None:
    if folder := os.environ.get("MLXRT_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def say(page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def last_answer(page) -> str:
    return page.locator("article.assistant .body").last.inner_text()


def wait_for_text(page, text: str) -> None:
    page.locator("article.assistant .body", has_text=text).last.wait_for()


def wait_for_end(page) -> None:
    page.wait_for_selector("#stop", state="hidden")


def test_a_conversation_on_the_page(served, page):
    launch = served.engine.core.runner.launch
    served.slow_down(0.02)  # the page shows the thinking while it goes on
    served.script[:] = [THOUGHT + ANSWER]
    say(page, "Can you answer with Markdown?")
    page.locator("details.reasoning[open]").wait_for()
    served.engine.core.runner.launch = launch
    page.wait_for_selector("article.assistant pre")
    wait_for_end(page)
    assert page.locator("article.assistant strong").inner_text() == "Three"
    assert page.locator("article.assistant li").count() == 2
    assert "print('hello')" in page.locator("article.assistant pre").inner_text()
    reasoning = page.locator("details.reasoning")
    assert reasoning.count() == 1 and reasoning.get_attribute("open") is None
    assert "what could it be" in reasoning.text_content()
    assert "tokens" in page.locator("article.assistant .tools").last.inner_text()
    keep(page, "page-light")

    served.script[:] = ["Another answer."]
    page.locator("article.assistant").get_by_role("button", name="Regenerate").click()
    wait_for_text(page, "Another answer.")
    wait_for_end(page)
    assert "cached" in page.locator("article.assistant .tools").last.inner_text()

    page.locator("article.user").get_by_role("button", name="Edit").click()
    assert page.input_value("#input") == "Can you answer with Markdown?"
    assert page.locator("article").count() == 0
    served.script[:] = ["The edited one."]
    say(page, "Can you answer without it?")
    wait_for_text(page, "The edited one.")
    wait_for_end(page)
    assert page.locator("article").count() == 2

    page.reload()
    page.wait_for_selector("article.assistant")
    assert last_answer(page) == "The edited one."


def test_stop_ends_the_request(served, page):
    launch = served.engine.core.runner.launch
    served.slow_down(0.05)
    try:
        served.script[:] = ["word " * 80]
        say(page, "Say many words")
        wait_for_text(page, "word")
        page.click("#stop")
        wait_for_end(page)
        wait_for(lambda: not served.engine.core.busy)
    finally:
        served.engine.core.runner.launch = launch
    assert 0 < len(last_answer(page)) < 400
    served.script[:] = ["Here again."]
    say(page, "And now?")
    wait_for_text(page, "Here again.")


def test_dark_mode_stays(served, page):
    page.emulate_media(color_scheme="light")
    served.script[:] = [ANSWER]
    say(page, "In the dark?")
    page.wait_for_selector("article.assistant pre")
    wait_for_end(page)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#toggle-theme")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark" and dark != light
    keep(page, "page-dark")
    page.reload()
    page.wait_for_selector("article.assistant pre")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_it_is_used_by_keyboard(served, page):
    served.script[:] = ["Typed."]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the message box
    page.focus("#input")
    page.keyboard.type("no mouse")
    page.keyboard.press("Enter")
    wait_for_text(page, "Typed.")


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    packed = npm and subprocess.run(
        [npm, "pack", "axe-core@4"], cwd=folder, capture_output=True, text=True, check=False
    )
    if not packed or packed.returncode:
        pytest.skip("axe-core cannot be fetched from npm")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(served, page, axe, theme):
    page.emulate_media(color_scheme=theme)
    served.script[:] = [THOUGHT + ANSWER]
    say(page, "Is it accessible?")
    page.wait_for_selector("article.assistant pre")
    wait_for_end(page)
    page.click("#toggle-settings")
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))")
    assert [v for v in found if v[0] in ("serious", "critical")] == []


@pytest.fixture
def other_origin() -> Iterator[str]:
    """A page of another origin."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>other</title>")

        def log_message(self, *_):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=site.serve_forever, daemon=True)
    thread.start()
    yield f"http://localhost:{site.server_port}"
    site.shutdown()
    thread.join()
    site.server_close()


SEND = """([url, mode, type]) => fetch(url + '/v1/chat/completions', {
    method: 'POST', mode, ...(type ? {headers: {'content-type': type}} : {}),
    body: JSON.stringify({messages: [{role: 'user', content: 'run'}], max_tokens: 2}),
}).then(r => r.status, () => 'failed')"""


def test_a_page_of_another_origin_runs_nothing(served, browser, other_origin):
    """A browser sends such a POST without asking first: it must end before the engine."""
    page = browser.new_page()
    page.goto(other_origin)
    before = served.engine.stats().requests
    for mode in ("cors", "no-cors"):
        for kind in (None, "application/json"):
            assert page.evaluate(SEND, [served.url, mode, kind]) != 200
    assert served.engine.stats().requests == before
    page.goto(served.url)
    assert page.evaluate(SEND, [served.url, "cors", "application/json"]) == 200
    assert served.engine.stats().requests == before + 1
    page.close()
