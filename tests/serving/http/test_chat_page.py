"""The chat page, tested with Chromium, which Playwright controls."""

import base64
import shutil

import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import chat_frontend, serving


# An image of one pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """Return a function that opens the page of a server. The page must not have logged errors at the end."""
    context, told, asked = browser.new_context(), [], []

    def opened(server):
        page = context.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{server.port}/")
        return page

    yield opened
    context.close()
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in asked)
    assert all("400 (Bad Request)" in text or "401 (Unauthorized)" in text for text in told)


@pytest.mark.slow
def test_conversation_continues_and_can_be_stopped(visit):
    with serving(FakeEngine(seconds=0.01)) as server:
        page = visit(server)
        assert page.title() == "fake" and not page.is_visible("#keyed") and not page.is_visible("#seeing")
        page.click("summary")
        page.fill("#most", "5")
        page.fill("#temperature", "0")
        page.fill("#system", "Be brief.")
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        page.wait_for_selector("#state:has-text('5 tokens in')")
        assert page.inner_text(".assistant").endswith("%&'()")
        page.fill("#most", "400")
        page.fill("#text", "go on")
        page.click("#send")
        page.wait_for_selector("#state:has-text('writing')")
        assert page.is_disabled("#send")
        page.click("#stop")
        page.wait_for_selector("#state:has-text('stopped')")
        assert page.evaluate("messages.map((one) => one.role)") == ["user", "assistant"] * 2
        assert page.evaluate("document.activeElement.id") == "text" and server.engine.cancelled
        asked = server.json("/detokenize", {"tokens": server.engine.seen[-1].prompt})["prompt"]
        assert asked.startswith("<|begin|><|user|>Be brief.") and "<|assistant|>%&'()" in asked
        page.click("#clear")
        assert page.inner_text("#talk") == "" and page.evaluate("messages.length") == 0


@pytest.mark.slow
def test_text_and_errors_are_shown_as_text(visit):
    said = "<img src=x onerror=alert(1)>&amp;"
    ids = tuple(chat_frontend().encode(said, special=False))
    with serving(FakeEngine(script=ids)) as server:
        page = visit(server)
        page.click("summary")
        page.fill("#most", str(len(ids)))
        page.fill("#text", "<b>hi</b>")
        page.click("#send")
        page.wait_for_selector("#state:has-text('tokens in')")
        assert page.inner_text(".assistant").endswith(said) and page.inner_text(".user").endswith("<b>hi</b>")
        page.evaluate("document.getElementById('most').removeAttribute('max')")
        page.fill("#most", "100000")
        page.fill("#text", "more")
        page.click("#send")
        page.wait_for_selector(".problem")
        assert "max_tokens=100,000" in page.inner_text(".problem")


@pytest.mark.slow
def test_page_asks_for_an_api_key(visit):
    with serving(FakeEngine(), api_keys=("secret",)) as server:
        page = visit(server)
        assert page.is_visible("#key")
        page.fill("#text", "hi")
        page.click("#send")
        page.wait_for_selector(".problem")
        page.fill("#key", "secret")
        page.fill("#most", "3")
        page.fill("#text", "hi")
        page.click("#send")
        page.wait_for_selector("#state:has-text('3 tokens in')")


@pytest.mark.slow
def test_images_are_sent_with_the_message(visit, monkeypatch):
    from eqx_decoders.serving.frontend.prompts import TextFrontend

    monkeypatch.setattr(TextFrontend, "takes_images", True)
    with serving() as server:
        page = visit(server)
        page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
        page.wait_for_selector("#images img")
        page.fill("#text", "what is it?")
        page.click("#send")
        page.wait_for_selector(".problem:has-text('this model takes no images')")  # the image was part of the request


@pytest.mark.slow
def test_controls_have_names_and_keyboard_focus(visit):
    with serving() as server:
        page = visit(server)
        page.click("summary")
        names = page.evaluate(
            "[...document.querySelectorAll('input, textarea, button')].filter((one) => one.checkVisibility())"
            ".map((one) => (one.labels && one.labels.length ? one.labels[0].textContent : one.textContent).trim())"
        )
        assert all(names) and len(names) == 7
        page.focus("#clear")
        reached = set()
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"scroll", "SUMMARY", "system", "temperature", "most", "text", "send"} <= reached
