"""The page of `launcher compare --html` in a browser: sorting, hovering, dark and light mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.features.compare.comparison import compare, page
from launcher.features.compare.measured import Measured
from tests.e2e.browser import Page, browser, program

LOSSES = tuple((float(i), 2.0 / i) for i in range(1, 60))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = program()
    if executable is None:
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("page")
    runs = [
        Measured(f"r-{i}", f"batch_size={i + 1}", "ddp", i + 1, 32, rate, 90.0 + i, 91.0, 95.0, 9.0, 1, "x", LOSSES)
        for i, rate in enumerate((90.0, 1000.0, 200.0))
    ]
    (folder / "page.html").write_text(page(compare(runs), "a <b>"))
    with browser(executable, folder / "profile") as found:
        found.open((folder / "page.html").as_uri())
        found.wait_for("document.querySelectorAll('#charts svg').length === 4")
        yield found


def column(tab: Page, index: int) -> list[str]:
    found: list[str] = tab.evaluate(
        f"[...document.querySelectorAll('tbody tr')].map(row => row.cells[{index}].textContent)"
    )
    return found


def test_clicking_a_header_sorts_and_clicking_again_reverses(tab: Page) -> None:
    assert column(tab, 5) == ["90.0", "1000.0", "200.0"]
    tab.evaluate("document.querySelectorAll('th')[5].click()")
    assert column(tab, 5) == ["1000.0", "200.0", "90.0"]
    tab.evaluate("document.querySelectorAll('th')[5].click()")
    assert column(tab, 5) == ["90.0", "200.0", "1000.0"]
    tab.evaluate("document.querySelectorAll('th')[0].click()")
    assert column(tab, 0) == ["batch_size=1", "batch_size=2", "batch_size=3"]


def test_hovering_over_a_curve_shows_run_time_and_value(tab: Page) -> None:
    script = "const at = document.querySelector('#charts path').getBoundingClientRect(); return [at.x, at.y, at.width];"
    x, y, width = tab.evaluate(f"(() => {{ {script} }})()")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + width, y=y + 200)
    tooltip = tab.wait_for(
        "document.getElementById('tip').style.display === 'block' && document.getElementById('tip').textContent"
    )
    run, time, loss = tooltip.split("\n")
    assert run.startswith("batch_size=")
    assert float(loss.removeprefix("loss ")) == pytest.approx(2 / float(time.removeprefix("seconds ")), rel=1e-3)


def test_a_run_can_be_hidden_without_network_access(tab: Page) -> None:
    curves = "document.querySelectorAll('#charts section:first-child path').length"
    assert tab.evaluate(curves) == 3
    tab.evaluate("document.querySelector('#legend button').click()")
    assert tab.evaluate(curves) == 2
    tab.evaluate("document.querySelector('#legend button').click()")
    assert tab.evaluate("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [640, 1600])
@pytest.mark.parametrize(("scheme", "dark"), [("dark", True), ("light", False)])
def test_dark_and_light_and_no_scrolling_sideways(tab: Page, scheme: str, dark: bool, width: int) -> None:
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    colours = "['backgroundColor', 'color'].map(key => +getComputedStyle(document.body)[key].match(/[0-9]+/)[0])"
    back, text = tab.evaluate(colours)
    assert (back < 64 and text > 192) if dark else (back > 192 and text < 64)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
