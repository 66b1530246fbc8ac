"""The page of a report: one valid file that needs nothing else, whatever the data contains."""

import base64
import hashlib
import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.testing import fill_batch
from ragged_pipeline import reports
from ragged_pipeline.reports.drawing import Drawing, Text
from ragged_pipeline.reports.page import figures_of, sections_of
from ragged_pipeline.reports.palette import DARK, LIGHT

VOID = {"meta", "br", "polyline"}
HOSTILE = "\"><script>alert(1)</script>'&lt;\x00\u202e<img src=http://evil.example/x onerror=a()>"
# fmt: off
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "div", "h1", "h2", "h3", "p", "dl",
    "dt", "dd", "nav", "ol", "li", "a", "main", "section", "figure", "figcaption", "details",
    "summary", "table", "thead", "tbody", "tr", "th", "td", "footer", "code",
    "svg", "desc", "rect", "polyline", "text",
}
# fmt: on


class Checker(html.parser.HTMLParser):
    """Collects ids, references and texts; fails where tags do not nest."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], []
        self.attributes, self.values = set(), []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED, tag
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name != "aria-label":  # that is a text
                self.values.append(value)
            if name == "id":
                self.ids.append(value)
            if name == "href":
                assert value.startswith("#"), value
                self.references.append(value[1:])
            if name in {"aria-labelledby", "aria-describedby"}:
                self.references += value.split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path):
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert set(checker.references) <= set(checker.ids)
    return text, checker


def hostile(batch):
    """The batch with ids, reasons and groups that try to leave their place."""
    for name in ("sample_id", "group_id", "finish_reason"):
        place = batch.schema.get_field_index(name)
        values = [f"{HOSTILE}{i}" for i in range(batch.num_rows)]
        if name == "finish_reason":
            values = [HOSTILE] * batch.num_rows
        batch = batch.set_column(place, batch.schema.field(place), pa.array(values))
    return batch


@pytest.fixture(scope="module")
def samples():
    columns = [
        "group_id", "finish_reason", "policy_version", "reward", "advantage", "candidate_counts",
        "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs",
        rf.Column("own_counts", "target", pa.int32(), opens=f"../{HOSTILE}", head_kind="set"),
        rf.Column(f"../{HOSTILE}_ids", f"../{HOSTILE}", pa.int32()),
    ]  # fmt: skip
    schema = rf.sample_schema(vocab_size=400, columns=columns)
    return fill_batch(schema, np.random.default_rng(1), [12] * 24, max_width=30, nulls=0.1)


@pytest.fixture(scope="module", params=["sample", "packed"])
def dataset(request, samples, tmp_path_factory):
    """A dataset of either profile, with hostile texts everywhere."""
    batch = hostile(samples)
    if request.param == "packed":
        batch = rf.concat(
            [pack_row(batch.slice(i, 8), null_advantage="keep") for i in range(0, 24, 8)]
        )
    schema = batch.schema.with_metadata(batch.schema.metadata | {b"note": HOSTILE.encode()})
    path = tmp_path_factory.mktemp("page") / "<b>data<b>"
    with rf.Writer(path, schema, lineage={HOSTILE: [{"deep": HOSTILE}], "ranks": 2}) as writer:
        writer.write(batch.replace_schema_metadata(schema.metadata))
    return path


@pytest.fixture(scope="module")
def made(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "report.html"
    return path, reports.report(dataset, path).statistics


def test_the_page_is_well_formed_and_loads_nothing(made):
    text, checker = checked(made[0])
    assert not checker.attributes & {"src", "style", "onerror", "onload", "srcset", "data"}
    # Texts of the data may hold addresses; attributes and the style hold none.
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    for part in [style, *checker.values]:
        assert not re.search(r"https?:|//|url\(|@import|javascript:", part.replace(HOSTILE, ""))
    assert text.startswith("<!doctype html>\n")


def test_the_policy_allows_the_style_and_nothing_else(made):
    text, _ = checked(made[0])
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"content=\"default-src 'none'; style-src 'sha256-{digest}'\"" in text
    assert text.count("<style>") == 1


def test_hostile_texts_stay_texts(made):
    text, checker = checked(made[0])
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x00" not in text
    assert "<b>data" not in text
    assert checker.tags.count("h1") == 1


def test_every_chart_has_a_name_a_description_and_its_numbers(made):
    text, checker = checked(made[0])
    figures = checker.tags.count("figure")
    assert figures >= 15
    assert checker.tags.count("details") == checker.tags.count("figcaption") == figures
    charts = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(charts) >= figures
    for chart in charts:
        assert 'role="img"' in chart
        key = re.search(r'aria-labelledby="(\S+)-t \1-d"', chart)[1]
        assert f'<title id="{key}-t">' in chart
        assert len(re.search(rf'<desc id="{key}-d">(.*?)</desc>', chart, re.DOTALL)[1]) > 20


def test_charts_stay_inside_their_canvas(made):
    for figure in figures_of(sections_of(made[1])):
        for width in (380.0, 800.0):
            drawing = figure.draw(width)
            assert isinstance(drawing, Drawing)
            for shape in drawing.shapes:
                for x, y in corners(shape):
                    assert -0.5 <= x <= width + 0.5, (figure.key, shape)
                    assert -0.5 <= y <= drawing.height + 0.5, (figure.key, shape)


def corners(shape):
    if hasattr(shape, "points"):
        return shape.points
    if isinstance(shape, Text):
        return [(shape.x, shape.y)]
    assert shape.width >= 0
    assert shape.height >= 0
    return [(shape.x, shape.y), (shape.x + shape.width, shape.y + shape.height)]


def test_both_palettes_name_the_same_roles_and_texts_are_readable():
    assert LIGHT.keys() == DARK.keys()
    for palette in (LIGHT, DARK):
        for ink in ("ink", "muted"):
            for ground in ("page", "card", "soft"):
                assert contrast(palette[ink], palette[ground]) >= 4.5
        for number in range(1, 7):
            assert contrast(palette[f"series{number}"], palette["card"]) >= 3
        assert contrast(palette["on"], palette["series1"]) >= 4.5
        assert contrast(palette["ink"], palette["pale1"]) >= 4.5


def contrast(one, other):
    """Contrast ratio of two colors, as WCAG 2 defines it."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_report_is_replaced_and_another_file_is_not(dataset, made, tmp_path):
    target = tmp_path / "notes.html"
    target.write_text("<p>my notes</p>")
    with pytest.raises(rf.DatasetExistsError) as caught:
        reports.report(dataset, target)
    assert caught.value.code == "RF-C009"
    assert target.read_text() == "<p>my notes</p>"
    with pytest.raises(rf.DatasetExistsError):
        reports.report(dataset, tmp_path)
    with pytest.raises(rf.DatasetNotFoundError):
        reports.report(dataset, tmp_path / "no" / "report.html")
    shutil.copy(made[0], target)
    assert reports.report(dataset, target).html == str(target)
    assert target.read_bytes() == made[0].read_bytes()


def test_pictures_show_the_same_figures(dataset, made, tmp_path):
    pytest.importorskip("matplotlib")
    found = reports.report(dataset, png_dir=tmp_path / "png")
    keys = [figure.key for figure in figures_of(sections_of(made[1]))]
    assert [Path(path).name for path in found.pngs] == [f"{key}.png" for key in keys]
    assert {Path(path).parent for path in found.pngs} == {tmp_path / "png"}
    for path in found.pngs:
        assert Path(path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert found.html is None


def test_a_missing_painter_is_named_before_anything_is_read(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(rf.MissingDependencyError, match="matplotlib"):
        reports.report(dataset, tmp_path / "r.html", png_dir=tmp_path)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.chromium
def test_a_browser_shows_it_light_and_dark(made, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    pictures = []
    for scheme in (1, 0):
        picture = tmp_path / f"{scheme}.png"
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1280,3000",
                f"--screenshot={picture}", made[0].as_uri(),
            ],
            check=True, capture_output=True, timeout=100,
        )  # fmt: skip
        pictures.append(picture.read_bytes())
    assert all(len(picture) > 50_000 for picture in pictures)  # an empty page is a few kB
    assert pictures[0] != pictures[1]
