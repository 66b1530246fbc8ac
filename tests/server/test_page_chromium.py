"""The page in a real browser: what it shows, how it is used, and that it keeps to its policy."""

import re

import numpy as np
import pyarrow as pa
import pytest
from support.http_server import running
from support.memory_store import MemoryStore

import ragged_format as rf
from ragged_format.testing import fill_batch, rollouts
from ragged_server.client import Client
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(300)]

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run", "--disable-dev-shm-usage",
]  # fmt: skip
# Between the ends of ranges.
DASH = "\N{EN DASH}"
SIZES = {"wide": (1440, 1000), "middle": (900, 1000), "narrow": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    # Not installed where these tests do not run, so not imported where they are collected.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Open pages; every console error, breach of policy and fault of a script fails the test."""
    contexts, faults = [], []

    def run(url, size="wide", theme="light", quiet=False, **options):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme,
            reduced_motion="reduce", **options,
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15000)
        if not quiet:
            page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        return page

    yield run
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models

    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = {"[UNK]": 0, **{f"word{n}": n for n in range(1, 900)}}
    Tokenizer(models.WordLevel(words, "[UNK]")).save(str(file))
    return file


def samples(count=40, **options):
    return rollouts(
        np.random.default_rng(0), num_samples=count, vocab_size=1000, prompt_length=30,
        response_length=40, max_candidates=200, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("server")
    store = Store(folder / "live", StoreSettings(segment_records=30))
    store.open()
    with running(folder / "live", store, tokenizer=str(tokenizer)) as server:
        with Client(server.url) as client:
            client.push(samples(), max_records=10, in_flight=1)
        yield server


@pytest.fixture
def empty_server(tmp_path):
    with running(tmp_path / "live", MemoryStore()) as server:
        yield server


def ready(page):
    page.locator("#state", has_text="ready").wait_for()
    page.locator(".token").first.wait_for()
    return page


def text(page, selector):
    return page.locator(selector).inner_text()


def test_overview(server, open_page):
    page = ready(open_page(server.url))
    assert page.title() == f"live {DASH} ragged server"
    tiles = text(page, "#tiles")
    assert re.search(rf"Records\s+40\s+sequence 0 {DASH} 39", tiles)
    assert re.search(r"Last commit\s+\S+", tiles)
    label = page.locator("#widths [role=img]").get_attribute("aria-label")
    assert label.startswith("Candidate sets by size. 1: ")
    assert page.locator("#rate svg[role=img]").get_attribute("aria-label").startswith("Records per")
    page.locator("#shards tbody tr").first.wait_for()
    assert "sealed shard" in text(page, "#shards")


def test_the_rate_is_live(server, open_page):
    page = ready(open_page(server.url))
    before = text(page, "#tiles")
    with Client(server.url) as client:
        client.push(samples(20, prefix="later"), max_records=5)
    page.wait_for_function("old => document.querySelector('#tiles').innerText !== old", arg=before)
    page.wait_for_function("!/^0\\/s/m.test(document.querySelector('#tiles').innerText)")
    page.locator("#latest", has_text="newer").click()
    page.locator("#records li", has_text="later").first.wait_for()


def test_a_sample_and_its_tokens(server, open_page):
    page = ready(open_page(server.url))
    page.fill("#jump-to", "7")
    page.press("#jump-to", "Enter")
    page.locator("#records li[aria-selected=true] .place", has_text=re.compile("^7$")).wait_for()
    page.wait_for_function(
        "document.querySelector('.record .muted').innerText.startsWith('sequence 7 ')"
    )
    record = next(rf.open_source(server.url).batches()).to_pylist()[7]
    assert text(page, ".record h3") == record["sample_id"]
    cells = page.locator(".token")
    assert cells.count() == min(256, len(record["input_ids"]))
    scored = record["completion_mask"].index(1)
    word = record["input_ids"][scored]
    assert cells.nth(scored).locator(".text").inner_text() in (f"word{word}", str(word))
    assert text(page, ".token[aria-selected=true] .size") == str(record["candidate_counts"][0])
    heads = page.locator(".axes section").first
    assert "Sampler" in heads.inner_text()
    assert heads.locator("li").count() == record["topk_counts"][0]
    assert page.locator(".axes .sampled").count() >= 1


def test_keys_of_the_keyboard(server, open_page):
    page = ready(open_page(server.url))
    chosen = "#records li[aria-selected=true] .place"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "jump-to"
    page.keyboard.type("20")
    page.keyboard.press("Enter")
    page.locator(chosen, has_text=re.compile("^20$")).wait_for()
    page.locator("#records").focus()
    page.keyboard.press("ArrowDown")
    page.locator(chosen, has_text=re.compile("^19$")).wait_for()
    page.keyboard.press("k")
    page.keyboard.press("k")
    page.locator(chosen, has_text=re.compile("^21$")).wait_for()
    page.wait_for_function(
        "document.querySelector('.record .muted').innerText.startsWith('sequence 21 ')"
    )
    page.locator(".tokens").focus()
    first = page.locator(".tokens").get_attribute("aria-activedescendant")
    page.keyboard.press("ArrowRight")
    second = page.locator(".tokens").get_attribute("aria-activedescendant")
    assert second != first
    assert page.locator(f"#{second}").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert page.locator(".tokens").get_attribute("aria-activedescendant") == first
    page.keyboard.press("?")
    assert page.locator("#help-dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help-dialog").is_visible()


def test_a_sequence_that_is_not_there(server, open_page):
    page = ready(open_page(server.url))
    page.fill("#jump-to", "100000")
    page.press("#jump-to", "Enter")
    page.locator(".record .empty", has_text="There is no sample 100,000").wait_for()


def test_long_samples_are_shown_in_windows(tmp_path, open_page):
    long = fill_batch(
        rf.sample_schema(vocab_size=1000, columns=["candidate_counts", "candidate_ids"]),
        np.random.default_rng(0), [700],
    )  # fmt: skip
    with running(tmp_path / "live", MemoryStore()) as other:
        with Client(other.url) as client:
            client.push(long)
        page = ready(open_page(other.url))
        assert f"tokens 0 {DASH} 255 of 700" in text(page, ".window")
        page.get_by_role("button", name="Later").click()
        page.locator(".window", has_text=f"tokens 256 {DASH} 511 of 700").wait_for()
        assert page.locator(".token").count() == 256
        # Without log-probs a set is a list of ids; without a tokenizer ids stand for text.
        page.locator(".token .size", has_text=re.compile("^[1-9]")).first.click()
        assert page.locator(".chips li").count() >= 1
        assert re.fullmatch(r"\d+", page.locator(".token .text").first.inner_text())


def test_nothing_is_stored_yet(empty_server, open_page):
    page = open_page(empty_server.url)
    page.locator(".record .empty", has_text="No samples yet").wait_for()
    assert f"ragged push {empty_server.url} DATASET" in text(page, ".record pre")
    assert page.locator("#older").is_disabled()
    with Client(empty_server.url) as client:
        client.push(samples(3))
    page.locator(".token").first.wait_for()


def test_a_key_is_asked_for(tmp_path, open_page, monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", "reader:read:a-secret-of-the-reader")
    with running(tmp_path / "live", MemoryStore()) as server:
        page = open_page(server.url, quiet=True)  # 401 is an error of the console
        page.locator("#key-dialog").wait_for(state="visible")
        assert "key needed" in text(page, "#state")
        page.fill("#key", "a-secret-of-somebody")
        page.press("#key", "Enter")
        page.locator("#key-why", has_text="does not take this key").wait_for()
        page.fill("#key", "a-secret-of-the-reader")
        page.press("#key", "Enter")
        page.locator("#state", has_text="ready").wait_for()
        assert page.locator("#key-dialog").is_hidden()
        assert "a-secret" not in page.content()
        page.reload()
        page.locator("#state", has_text="ready").wait_for()
        page.locator("#key-button").wait_for(state="attached")


def test_the_server_goes_away_and_comes_back(tmp_path, open_page):
    from support.served import Served

    with Served(tmp_path / "live") as server:
        with Client(server.url) as client:
            client.push(samples(5))
        page = ready(open_page(server.url, quiet=True))
        server.kill()
        page.locator("#banner", has_text="does not answer").wait_for()
        assert "no answer" in text(page, "#state")
        server.start()
        page.locator("#state", has_text="ready").wait_for()
        page.locator("#banner").wait_for(state="hidden")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_it_fits_and_can_be_read(server, open_page, tmp_path, size, theme):
    page = ready(open_page(server.url, size, theme))
    width = SIZES[size][0]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    picture = page.screenshot(path=str(tmp_path / f"{size}-{theme}.png"), full_page=True)
    assert picture.startswith(b"\x89PNG")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) > 384) == (theme == "light")


def test_the_theme_can_be_chosen(server, open_page):
    page = ready(open_page(server.url, theme="light"))
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.locator("#theme-button").click()
    assert page.evaluate(back) == light
    page.locator("#theme-button").click()
    assert page.evaluate(back) != light
    page.reload()
    ready(page)
    assert page.evaluate(back) != light
    assert text(page, "#theme-button") == "Dark"


def test_names_and_roles(server, open_page):
    """What assistive software is told: every control has a name, every list its options."""
    page = ready(open_page(server.url))
    assert page.evaluate(NAMELESS) == []
    assert (
        page.get_by_role("listbox", name=re.compile("Samples")).get_by_role("option").count() == 25
    )
    assert page.get_by_role("listbox", name=re.compile("Tokens")).get_by_role("option").count() > 10
    assert page.get_by_role("status").inner_text() == "ready"
    assert page.get_by_role("main").count() == 1
    assert page.locator("h1").count() == 1


def test_text_of_samples_is_never_markup(empty_server, open_page):
    evil = "<img src=x onerror=document.title='hacked'>"
    row = {
        "sample_id": evil,
        "input_ids": [1, 2],
        "completion_mask": [0, 1],
        "provenance": f'{{"a": "{evil}"}}',
    }
    schema = rf.sample_schema(vocab_size=10, columns=["provenance"])
    with Client(empty_server.url) as client:
        client.push(pa.RecordBatch.from_pylist([row], schema=schema))
    page = ready(open_page(empty_server.url))
    assert text(page, ".record h3") == evil
    assert page.locator(".record img").count() == 0
    assert page.title() == f"live {DASH} ragged server"


# Visible texts whose contrast with what is behind them is below 4.5 : 1 (WCAG 2.2, AA).
CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const out = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .hidden, .skip, svg")) continue;
    let behind = element;
    while (behind && rgba(getComputedStyle(behind).backgroundColor)[3] < 255) {
      behind = behind.parentElement;
    }
    const [a, b] = [light(rgba(getComputedStyle(element).color)),
      light(rgba(getComputedStyle(behind ?? document.body).backgroundColor))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) out.push([element.className, element.textContent.slice(0, 30), ratio]);
  }
  return out;
}
"""
NAMELESS = """
() => [...document.querySelectorAll("button, input, [role=img], [tabindex]")].filter((element) =>
  !(element.textContent.trim() || element.ariaLabel || element.getAttribute("aria-labelledby")
    || element.labels?.length)).map((element) => element.outerHTML)
"""
