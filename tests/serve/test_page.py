"""The chat page, in a real browser where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.api import LLM
from tests.serve.live import CHAT, Live, serving, wait_for

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVIL = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>&lt;b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": 1100, "height": 800})
    made.set_default_timeout(30_000)
    yield made
    made.close()


@pytest.fixture
def page(context: Any) -> Any:
    """A page that must stay without errors and must ask nobody but the server."""
    opened = context.new_page()
    opened.faults, opened.asked = [], []
    opened.on("pageerror", lambda error: opened.faults.append(str(error)))
    opened.on("request", lambda request: opened.asked.append(request.url))
    return opened


def opened(page: Any, live: Live) -> Any:
    page.goto(live.url)
    page.wait_for_selector(".tries button")
    return page


def say(page: Any, text: str) -> None:
    page.fill("#say", text)
    page.press("#say", "Enter")


def last_answer(page: Any) -> str:
    page.wait_for_selector("#turns[aria-busy=false] .turn.assistant:last-child .under")
    text: str = page.locator(".turn.assistant .said").last.text_content()
    return text


def short(page: Any, tokens: int = 40, temperature: float = 0) -> None:
    page.fill("#longest", str(tokens))
    page.evaluate(
        "t => { const e = document.getElementById('temperature'); e.value = t; e.oninput(); }",
        temperature,
    )


def test_the_page_is_one_file_that_names_no_other_place(live: Live) -> None:
    got = live.get("/")
    assert got.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in got.headers["content-security-policy"]
    assert "unsafe" not in got.headers["content-security-policy"]
    places = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", got.text)
    assert set(places) <= {"http://www.w3.org"}, places  # the name of SVG, in an icon
    for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in got.text


def test_a_question_is_answered_as_by_the_library_and_the_next_turn_follows(
    page: Any, live: Live
) -> None:
    opened(page, live)
    assert page.locator("#model").text_content() == live.model
    short(page)
    page.fill("#system", "Be brief.")
    say(page, "Hi, hello, hi")
    first = last_answer(page)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, hello, hi"},
    ]
    assert first == live.llm.generate(messages, max_new_tokens=40).text
    say(page, "And then?")
    page.wait_for_selector(".turn.assistant >> nth=1")
    second = last_answer(page)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And then?"},
    ]
    assert second == live.llm.generate(messages, max_new_tokens=40).text
    under = page.locator(".under").last.text_content()
    assert re.search(r"\d\.\d\d tokens per pass", under)
    assert "s to first token" in under
    assert "prompt-lookup" in under
    assert page.faults == []
    assert all(url.startswith((live.url, "data:")) for url in page.asked), page.asked


def test_drafted_words_are_coloured_and_plain_decoding_has_none(page: Any, live: Live) -> None:
    opened(page, live)
    short(page, 120)
    say(page, "one two one two one two")
    text = last_answer(page)
    drafted = page.locator(".turn.assistant .drafted")
    assert drafted.count() > 0
    parts = page.locator(".turn.assistant .said span").all_text_contents()
    assert "".join(parts) == text
    colour = "e => getComputedStyle(e).backgroundColor"
    assert drafted.first.evaluate(colour) != "rgba(0, 0, 0, 0)"
    page.uncheck("#marks")
    assert drafted.first.evaluate(colour) == "rgba(0, 0, 0, 0)"
    assert not page.locator("#legend").is_visible()
    page.check("#marks")
    page.select_option("#method", "ar")
    page.click("#fresh")
    say(page, "one two one two one two")
    assert last_answer(page) == text
    assert page.locator(".turn.assistant .drafted").count() == 0
    assert "1.00 tokens per pass" in page.locator(".under").text_content()


def test_nothing_that_is_said_becomes_markup(page: Any, live: Live) -> None:
    opened(page, live)
    pieces = [[EVIL, True], [EVIL, False], [EVIL, False]]
    choice = {"index": 0, "delta": {"content": EVIL * 3}, "hasten": {"pieces": pieces}}
    said = f"data: {json.dumps({'choices': [{**choice, 'finish_reason': EVIL}]})}\n\n"
    refusal = json.dumps({"error": {"message": EVIL}})
    page.route("**/chat/completions", lambda route: route.fulfill(status=200, body=said))
    say(page, EVIL)
    assert last_answer(page) == EVIL * 3
    assert page.locator(".turn.user .said").text_content() == EVIL
    page.route("**/chat/completions", lambda route: route.fulfill(status=400, body=refusal))
    say(page, EVIL)
    page.wait_for_selector(".fault")
    assert page.locator(".fault").text_content() == EVIL
    assert page.locator("#turns img, #turns script, .said b, .fault b").count() == 0
    assert page.title() == "hasten"
    assert page.faults == []


def test_stop_ends_the_answer_here_and_on_the_server(page: Any, slow: LLM) -> None:
    with serving(slow) as live:
        opened(page, live)
        short(page, 900, 1.5)
        say(page, "Go on and on")
        page.wait_for_selector(".turn.assistant .said span")
        assert page.locator("#send").text_content() == "Stop"
        page.click("#send")
        last_answer(page)
        assert "stopped" in page.locator(".under").text_content()
        assert page.locator("#send").text_content() == "Send"
        live.idle()
        short(page, 5)
        say(page, "And now?")
        page.wait_for_selector(".turn.assistant >> nth=1")
        last_answer(page)


def test_a_new_chat_drops_the_answer_under_way(page: Any, slow: LLM) -> None:
    with serving(slow) as live:
        opened(page, live)
        short(page, 900, 1.5)
        say(page, "Go on and on")
        page.wait_for_selector(".turn.assistant .said span")
        page.click("#fresh")
        page.wait_for_selector(".tries button")
        live.idle()
        short(page, 5)
        say(page, "Hi")
        last_answer(page)
        assert page.locator(".turn").count() == 2
        assert page.evaluate("messages.length") == 2
        assert page.faults == []


def test_with_a_key_the_page_asks_for_it(page: Any, llm: LLM) -> None:
    with serving(llm, api_key="s3cret") as live:
        page.goto(live.url)
        page.wait_for_selector("dialog[open]")
        page.fill("#key", "wrong")
        page.click("dialog .go")
        page.wait_for_selector("dialog[open]")
        wait_for(lambda: page.input_value("#key") == "")
        page.fill("#key", "s3cret")
        page.click("dialog .go")
        page.wait_for_selector(".tries button")
        short(page, 5)
        say(page, "Hi")
        assert last_answer(page) is not None


def test_faults_are_shown_and_the_question_is_not_lost(page: Any, llm: LLM) -> None:
    with serving(llm, max_tokens=50) as live:
        opened(page, live)
        page.fill("#longest", "60")
        say(page, "My long question")
        page.wait_for_selector(".fault")
        assert "50 tokens" in page.locator(".fault").text_content()
        assert page.input_value("#say") == "My long question"
    page.press("#say", "Enter")
    page.wait_for_selector(".fault >> nth=1")
    assert "can't be reached" in page.locator(".fault").last.text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_phones_and_desktops_light_and_dark(
    browser: Any, live: Live, width: int, scheme: Any
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 740}, color_scheme=scheme)
    page = opened(context.new_page(), live)
    short(page, 30) if width > 820 else None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    settings = page.locator("#settings")
    assert settings.is_visible() is (width > 820)
    if width < 820:
        page.click("#open")
        wait_for(settings.is_visible)
        page.fill("#longest", "30")
        page.press("#longest", "Escape")
        wait_for(lambda: not settings.is_visible())
    say(page, "x" * 300 + " a long word")
    last_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = int(re.findall(r"\d+", ground)[0]) > 128
    assert light is (scheme == "light")
    context.close()


def test_a_request_like_the_pages_names_no_unknown_field(live: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "method": None,
        "temperature": 0.7,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "hasten": {"marks": True},
    }
    assert live.post(CHAT, body).status_code == 200
