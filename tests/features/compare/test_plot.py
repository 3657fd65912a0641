"""Comparisons as plots and as a page: complete and self-contained."""

import dataclasses
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from launcher.features.compare.comparison import Row, compare, page
from launcher.features.compare.measured import Measured
from launcher.features.compare.plot import draw


def rows(batches: tuple[int, ...]) -> list[Row]:
    """Return runs named a & b, a & b<, ...: names that a page must escape."""
    losses = ((1.0, 2.3), (2.0, 1.1), (3.0, 0.4))
    names = [f"a & b{'<' * i}" for i in range(len(batches))]
    return compare(
        [
            Measured(f"run{i}", name, "ddp", 1 + i, batch, 100.0 * (i + 1), 90.0 - i, 91.0, 95.0, 3.0, 1, "x", losses)
            for i, (name, batch) in enumerate(zip(names, batches, strict=True))
        ]
    )


def texts(svg: bytes) -> list[str]:
    """Return the texts of a plot: matplotlib draws them as shapes and keeps the text in comments."""
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", svg.decode(), re.DOTALL)]


@pytest.mark.parametrize(
    ("batches", "panels"),
    [
        ((32, 32), {"Training loss over time", "Speed", "Validation accuracy", "Speed-up"}),
        ((32, 64), {"Training loss over time", "Speed", "Accuracy over global batch", "Speed-up"}),
        ((32,), {"Training loss over time", "Speed", "Validation accuracy"}),
    ],
)
def test_a_plot_shows_what_the_runs_recorded(batches: tuple[int, ...], panels: set[str]) -> None:
    svg = draw(rows(batches), "svg")
    ET.fromstring(svg)
    titles = {"Training loss over time", "Speed", "Validation accuracy", "Accuracy over global batch", "Speed-up"}
    assert titles & set(texts(svg)) == panels
    assert any(text.startswith("a & b (ddp x 1)") for text in (word.replace("&amp;", "&") for word in texts(svg)))


def test_the_same_runs_always_give_the_same_plot() -> None:
    assert b"<dc:date>" not in draw(rows((32, 64)), "svg")


def test_a_png_is_large_enough_and_has_all_colours() -> None:
    picture = Image.open(io.BytesIO(draw(rows((32, 32, 32)), "png"))).convert("RGB")
    assert picture.width >= 1600
    seen = {colour for _, colour in picture.getcolors(picture.width * picture.height) or []}
    assert {(0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0x2C, 0xA0, 0x2C)} <= seen  # matplotlib's first three


def test_a_page_is_self_contained_and_escapes_names() -> None:
    text = page(rows((32, 64)), "a <b> & </script>")
    tags: list[str] = []
    attributes: list[tuple[str, str | None]] = []
    cells: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            attributes.extend(attrs)

        def handle_data(self, data: str) -> None:
            if tags[-1:] in (["td"], ["h1"], ["b"]):
                cells.append(data.strip())

    Reader().feed(text)
    assert not {"link", "iframe", "img", "object", "base", "b"} & set(tags)
    assert not {"src", "href", "xlink:href", "action"} & {name for name, _ in attributes}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(|innerHTML", text)
    assert {"a <b> & </script>", "a & b<"} <= set(cells)
    assert tags.count("tr") == 3
    assert tags.count("script") == text.count("</script>") == 2
    figures = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [figure["label"] for figure in figures] == ["a & b", "a & b<"]


def test_a_nan_loss_does_not_break_the_page() -> None:
    measured = dataclasses.replace(rows((32,))[0].measured, losses=((1.0, 2.0), (2.0, math.nan), (3.0, math.inf)))
    text = page(compare([measured]), "x").split('id="data">')[1].split("</script>")[0]
    assert json.loads(text, parse_constant=pytest.fail)[0]["losses"] == [[1.0, 2.0]]


def test_the_readmes_first_command_installs_what_a_plot_needs() -> None:
    root = Path(__file__).parents[3]
    command = re.search(r"pip install -c constraints\.txt -e '\.\[(.*?)\]'", (root / "README.md").read_text())
    assert command is not None
    extras = re.findall(rf"^{command[1]} = \[(.*)\]", (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert any("torch>=" in extra and "matplotlib" in extra for extra in extras)
    assert re.search(r"^matplotlib==", (root / "constraints.txt").read_text(), re.MULTILINE)
