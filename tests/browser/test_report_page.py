# SPDX-License-Identifier: Apache-2.0
"""The page of `ckptmgr report` in a real Chromium: `make browser`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.running import run
from tests.cli.test_report import LOSSES, saved_with_events
from tests.cli.watching import watching
from tests.support.saved import overwrite, save_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage")
SIZES = [(400, 800), (1400, 900)]
SCHEMES = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """A Chromium without a window, which reaches no host but this one."""
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("needs chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with every kind of checkpoint, chart and table."""
    directory = (
        tmp_path_factory.mktemp("runs") / "a-run-with-a-long-name-that-no-phone-shows-in-one-line"
    )
    directory.mkdir()
    saved_with_events(directory)
    damaged, *_ = save_run(directory, list(LOSSES), metrics=LOSSES)
    overwrite(damaged, b"short")
    target = directory.parent / "report.html"
    answer = run("report", directory, "--keep", "last(1) | best(1, loss, min)", "-o", target)
    assert answer.exit_code == 0, answer.stderr
    return target.as_uri()


def requests_of(browser: Chrome) -> list[str]:
    """Return the addresses that the browser asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        one["params"]["request"]["url"]
        for one in messages
        if one["method"] == "Network.requestWillBeSent"
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_page_fits_loads_nothing_and_has_no_errors(
    browser: Chrome, address: str, scheme: str, width: int, height: int
) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features: dict[str, Any] = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    requests_of(browser)
    browser.get(address)
    assert [one for one in requests_of(browser) if not one.startswith("data:")] == [address]
    assert browser.get_log("browser") == []
    # The page itself never scrolls sideways: wide charts and tables do so in their own boxes.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    back = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(back) == SCHEMES[scheme]
    assert browser.execute_script("return document.querySelectorAll('svg').length") == 3
    small = "return Math.min(...[...document.querySelectorAll('p,td,dd')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    assert browser.execute_script(small) >= 14


@pytest.mark.parametrize("scheme", SCHEMES)
def test_served_page_of_a_watch_loads_nothing_else(
    browser: Chrome, tmp_path: Path, scheme: str
) -> None:
    for name in ("a", "b"):
        save_run(tmp_path / name, [10, 20], series=name)
    features: dict[str, Any] = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    with watching(
        tmp_path / "a", tmp_path / "b", "--serve", "127.0.0.1:0", "--poll", "1d"
    ) as watch:
        url = watch.reports[0]["message"].removeprefix("the reports are at ")
        requests_of(browser)
        browser.get(url)
        browser.find_element("link text", str(tmp_path / "b")).click()
        assert browser.find_element("tag name", "h1").text == str(tmp_path / "b")
        assert [one for one in requests_of(browser) if not one.startswith("data:")] == [
            url,
            f"{url}2/",
        ]
        assert browser.get_log("browser") == []
        browser.get("about:blank")  # which no longer asks again
        assert watch.stop() == 0


def test_marks_explain_themselves_and_are_told_apart_without_colour(
    browser: Chrome, address: str
) -> None:
    browser.get(address)
    titles = browser.execute_script(
        "return [...document.querySelectorAll('svg circle title, svg path title')].map(e => e.textContent)"
    )
    assert any("step 20, loss 1, kept: best 1/1 loss=1" in title for title in titles), titles
    assert (
        browser.execute_script("return document.querySelectorAll('svg path.damaged').length") == 1
    )
    radii = browser.execute_script(
        "return ['kept', 'goes', 'gone'].map(c => document.querySelector('circle.' + c)?.r.baseVal.value)"
    )
    assert len(set(radii)) == 3
    assert None not in radii


def test_curve_is_a_line_with_whole_labels_clear_of_its_marks(
    browser: Chrome, tmp_path: Path
) -> None:
    steps = [1_000_000, 5_000_000, 10_000_000]
    save_run(tmp_path / "runs", steps, metrics={one: {"loss": 1.25e10 / one**2} for one in steps})
    target = tmp_path / "report.html"
    assert run("report", tmp_path / "runs", "-o", target).exit_code == 0
    browser.get(target.as_uri())
    outside = """return [...document.querySelectorAll('svg text')].filter(label => {
        const box = label.getBBox(), room = label.ownerSVGElement.viewBox.baseVal
        return box.x < 0 || box.x + box.width > room.width || box.y < 0 || box.y + box.height > room.height
    }).map(label => label.textContent)"""
    assert browser.execute_script(outside) == []
    covered = """const marks = [...document.querySelectorAll('svg circle')].map(mark => mark.getBBox())
        return [...document.querySelectorAll('svg text')].filter(label => {
            const box = label.getBBox()
            return marks.some(mark => mark.x < box.x + box.width && box.x < mark.x + mark.width
                && mark.y < box.y + box.height && box.y < mark.y + mark.height)
        }).map(label => label.textContent)"""
    assert browser.execute_script(covered) == []
    fill = "return getComputedStyle(document.querySelector('svg polyline')).fill"
    assert browser.execute_script(fill) == "none"
