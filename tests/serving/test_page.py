"""The page in a real browser: a chat whose tokens show their depths, by keyboard, wide and narrow, light and dark."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("starlette", reason="extra `serve`")
pytest.importorskip("uvicorn", reason="extra `serve`")

from dreamer_jax.serving.keys import Keys
from dreamer_jax.serving.server import PAGE
from tests.serving.browser import tab
from tests.serving.fake import TOKENIZER, FakeEngine
from tests.serving.served import make, running

READY = "document.getElementById('state').textContent === 'ready' && document.getElementById('model').textContent"
KEY = "0123456789abcdef"


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance of rgb(...)."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|src=|url\(", text) and 'rel="icon" href="data:,"' in text


def test_a_chat_wide_and_narrow_light_and_dark(tmp_path):
    engine = FakeEngine(pace=0.005, rows=4)
    with running(make(engine)) as url, tab(tmp_path / "profile") as page:
        backgrounds = set()
        for width, height, scheme in ((1280, 800, "light"), (390, 844, "dark")):
            page.open(url + "/", width, height, scheme)
            page.until(READY)
            page.run("document.getElementById('most').value = 40")
            page.write("<b>hé")  # the first thing that is written goes into the message: it has the focus
            page.press("Enter")
            page.until("!running && document.querySelectorAll('.t').length > 20")
            assert page.run("document.querySelector('.you').textContent") == "<b>hé"  # text, not HTML
            said = page.run("document.querySelector('.text').textContent")
            assert said == ("a" + "<b>hé\n" * 40).encode()[:40].decode(errors="replace")
            assert page.run("document.querySelector('.about').textContent").startswith("40 tokens, mean depth ")
            depths = page.run("[...document.querySelectorAll('.t')].map((t) => Number(t.dataset.depth))")
            assert depths[0] == 1 + ord("a") % 12 and depths[1] == 1 + (ord("<") + 1) % 12 and len(set(depths)) > 3
            # The same depth has the same colour, another one another, and words stay readable on each.
            colours = page.run("[...document.querySelectorAll('.t')].map((t) => getComputedStyle(t).backgroundColor)")
            assert len(set(zip(depths, colours, strict=True))) == len(set(depths)) == len(set(colours))
            rgb = page.run(
                "(() => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
                "return [...document.querySelectorAll('.t')].map((t) => { c.fillStyle = getComputedStyle(t)"
                ".backgroundColor; c.fillRect(0, 0, 1, 1); return c.getImageData(0, 0, 1, 1).data.join(' '); }); })()"
            )
            ink = page.run("getComputedStyle(document.body).color")
            assert min(contrast(ink, each) for each in rgb) > 4.5
            # By keyboard: the answer takes the focus, arrows go from token to token.
            page.run("document.querySelector('.text').focus()")
            page.press("ArrowRight")
            page.press("ArrowRight")
            assert page.run("document.getElementById('tip').textContent") == f"depth {depths[1]} of 12"
            assert page.run("getComputedStyle(document.getElementById('tip')).visibility") == "visible"
            page.press("Escape")
            assert page.run("getComputedStyle(document.getElementById('tip')).visibility") == "hidden"
            # Nothing sticks out to the side.
            assert page.run("document.documentElement.scrollWidth") <= width
            backgrounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
        light, dark = sorted(map(luminance, backgrounds), reverse=True)
        assert light > 0.9 and dark < 0.02
        assert page.errors == []


def test_the_engine_moves_and_a_stopped_answer_ends_in_it(tmp_path):
    engine = FakeEngine(pace=0.02, rows=4, context=4000)
    with running(make(engine, Keys([KEY]))) as url, tab(tmp_path / "profile") as page:
        page.open(url + "/", 1280, 800, "light")
        page.until("!document.getElementById('key-part').hidden")
        page.run(f"document.getElementById('key').value = '{KEY}'")
        page.until(READY)
        page.until("document.querySelectorAll('.row.free').length === 4")
        page.run("document.getElementById('sampler').value = 'lossless'; document.getElementById('text').focus()")
        page.write("x")
        page.press("Enter")
        page.until("document.querySelectorAll('.row.free').length === 3")
        page.until("document.querySelectorAll('.front i').length === 4")  # the wavefront: 12, 9, 6, 3 of 12 depths
        heights = "[...document.querySelectorAll('.front i')].map((i) => i.style.getPropertyValue('--d')).join()"
        assert page.run(heights) == "1.000,0.750,0.500,0.250"
        page.until("Number(document.getElementById('speed').textContent) > 5")
        assert page.run("document.getElementById('send').textContent") == "Stop"
        page.run("document.getElementById('send').click()")
        page.until("!running && document.querySelector('.about').textContent.endsWith('; stopped')")
        page.until("document.querySelectorAll('.row.free').length === 4")
        assert engine.cancelled and page.errors == []


def test_a_new_conversation_has_nothing_of_the_last_one(tmp_path):
    engine = FakeEngine(pace=0.02, context=4000)
    with running(make(engine)) as url, tab(tmp_path / "profile") as page:
        page.open(url + "/", 1280, 800, "light")
        page.until(READY)
        page.write("x")
        page.press("Enter")
        page.until("document.querySelectorAll('.t').length > 3")
        page.run("document.getElementById('new').click()")
        page.until("!running")
        page.run("document.getElementById('temperature').value = 0.75; document.getElementById('most').value = 2")
        page.run("document.getElementById('sampler').replaceChildren()")  # as long as nobody has said which there are
        page.write("y")
        page.press("Enter")
        page.until("!running && document.querySelectorAll('.t').length === 2")
        asked = engine.submitted[-1]
        assert asked.prompt == (TOKENIZER.bos, *b"y\n") and asked.sampling.temperature == 0.75
        assert page.errors == []


def test_an_answer_without_tokens_says_so(tmp_path):
    with running(make(FakeEngine(says=lambda request: [TOKENIZER.eos]))) as url, tab(tmp_path / "profile") as page:
        page.open(url + "/", 1280, 800, "light")
        page.until(READY)
        page.write("x")
        page.press("Enter")
        page.until("!running && document.querySelector('.about')")
        assert page.run("document.querySelector('.about').textContent") == "no tokens"


def test_a_key_is_asked_for_once_and_kept(tmp_path):
    """Who is asked for it may write something else meanwhile."""
    with running(make(FakeEngine(), Keys([KEY]))) as url, tab(tmp_path / "profile") as page:
        page.open(url + "/", 1280, 800, "light")
        page.until("document.activeElement === document.getElementById('key')")
        page.run("document.getElementById('text').focus(); window.asked = 0; const its = fetch;"
                 "window.fetch = (...all) => { window.asked += 1; return its(...all); }")  # fmt: skip
        page.until("window.asked > 3")
        assert page.run("document.activeElement.id") == "text"
        page.run(f"document.getElementById('key').value = '{KEY}'")
        page.until(READY)
        assert page.run("sessionStorage.getItem('key')") == KEY
        assert page.run("document.getElementById('key-part').hidden")


@pytest.mark.slow
def test_another_server_at_the_same_address(tmp_path):
    first = FakeEngine()
    with tab(tmp_path / "profile") as page:
        with running(make(first)) as url:
            page.open(url + "/", 1280, 800, "light")
            page.until(READY)
            page.run("document.getElementById('most').value = 200")
            page.write("x")
            page.press("Enter")
            page.until("!running && past.length > 3 && past.at(-1)[1] > 100")
        page.until("document.getElementById('state').textContent === 'not reachable'")
        least = "window.least = Math.min(window.least, Number(document.getElementById('speed').textContent))"
        page.run(f"window.least = 0; const its = draw; draw = (view) => {{ its(view); {least}; }}")
        with running(make(FakeEngine(), name="other"), int(url.rpartition(":")[2])):
            page.until("document.getElementById('model').textContent === 'other' && past.length > 2")
            page.run("document.getElementById('most').value = 3")
            page.write("y")
            page.press("Enter")
            page.until("!running && document.querySelectorAll('.answer').length === 2")
            assert page.run("[...document.querySelectorAll('.about')].at(-1).textContent").startswith("3 tokens")
            assert page.run("window.least") == 0


def test_an_answer_that_breaks_off_says_so(tmp_path):
    with running(make(FakeEngine(fails_at=6))) as url, tab(tmp_path / "profile") as page:
        page.open(url + "/", 1280, 800, "light")
        page.until(READY)
        page.write("x")
        page.press("Enter")
        page.until("document.querySelector('.about.wrong')")
        assert page.run("document.querySelector('.about').textContent").endswith("the answer broke off")
        page.run("document.getElementById('most').value = 100000")
        page.write("y")
        page.press("Enter")
        page.until("document.querySelectorAll('.about.wrong').length === 2")
        assert "don't fit the context" in page.run("[...document.querySelectorAll('.about')].at(-1).textContent")
        assert page.run("document.getElementById('text').value") == "y"  # to be sent once more
