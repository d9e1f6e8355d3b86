"""The status page in a browser. Skipped if none is installed."""

from __future__ import annotations

from collections.abc import Iterator

import browser
import pytest
from helpers import settles
from test_http import decoded

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """The page of a daemon that has decoded and that audits its attends."""
    folder = tmp_path_factory.mktemp("page")
    with decoded(folder) as watched, browser.opened(folder / "profile") as page:
        page.open(f"http://{watched.address}/", 360, 800)
        assert settles(
            lambda: page.value("document.getElementById('state')?.textContent") == "ready"
        )
        yield page


def text(page: browser.Page, selector: str) -> str:
    """The text of an element."""
    shown: str = page.value(f"document.querySelector('{selector}').textContent")
    return shown


def test_it_shows_what_the_daemon_holds_and_has_done(page: browser.Page) -> None:
    cells = page.value("[...document.querySelectorAll('#models td')].map(x => x.textContent)")
    assert cells[:3] == ["seen", "1", "3,020"]
    assert int(cells[3].replace(",", "")) > 0
    assert text(page, "#limit").endswith("GiB")
    assert text(page, "#read") != "–"
    assert text(page, "#median").endswith("s")
    assert "checked outputs have an error above epsilon" in text(page, "#audits")
    assert page.value("document.querySelectorAll('.layers .track').length") == 2
    assert "cpu:0" in text(page, "#devices") or "cuda:" in text(page, "#devices")
    # After two more answers, the page shows rates.
    assert settles(lambda: text(page, "#models td:nth-child(5)") == "0")


def test_it_fits_a_phone(page: browser.Page) -> None:
    assert page.value("document.documentElement.scrollWidth") == 360


def test_it_is_dark_where_that_is_preferred(page: browser.Page) -> None:
    def background() -> str:
        shade: str = page.value("getComputedStyle(document.body).backgroundColor")
        return shade

    light = background()
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    assert background() != light


def test_the_browser_has_no_complaints(page: browser.Page) -> None:
    # Neither errors of scripts, nor of requests, nor of the page's content security policy.
    assert page.complaints == []
