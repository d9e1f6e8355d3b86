"""The status page in a browser; skipped where none is installed."""

from __future__ import annotations

from collections.abc import Iterator

import browser
import numpy as np
import pytest
import spillway
from daemon_process import running_daemon
from helpers import settles
from test_http import ANY_PORT, decode, http_address

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """The page of a daemon that has decoded, and that checks its promises."""
    folder = tmp_path_factory.mktemp("page")
    audit = ("--audit-share", "1", "--audit-cpu-share", "1")
    with (
        running_daemon(folder, *ANY_PORT, *audit) as target,
        spillway.connect(target) as client,
        browser.opened(folder / "profile") as page,
    ):
        model = client.create_model(
            "seen",
            layer_count=2,
            query_head_count=4,
            kv_head_count=2,
            head_dim=32,
            dtype="float32",
        )
        sequence = client.create_sequence(model)
        rows = np.random.default_rng(1).standard_normal((2, 2, 2, 3000, 32), dtype=np.float32)
        sequence.append(0, 0, 3 * rows[0], rows[1])
        decode(sequence, 20)
        assert settles(lambda: client.statistics().audit.check_count > 0)
        page.open(f"http://{http_address(folder / 'spillwayd.log')}/", 360, 800)
        assert settles(
            lambda: page.value("document.getElementById('state')?.textContent") == "ready"
        )
        yield page


def text(page: browser.Page, selector: str) -> str:
    """What stands in an element."""
    shown: str = page.value(f"document.querySelector('{selector}').textContent")
    return shown


def test_it_shows_what_the_daemon_holds_and_has_done(page: browser.Page) -> None:
    cells = page.value("[...document.querySelectorAll('#models td')].map(x => x.textContent)")
    assert cells[:3] == ["seen", "1", "3,020"]
    assert int(cells[3].replace(",", "")) > 0
    assert text(page, "#limit").endswith("GiB")
    assert text(page, "#read") != "–"
    assert text(page, "#median").endswith("s")
    assert "checked promises broken" in text(page, "#audits")
    assert page.value("document.querySelectorAll('.layers .track').length") == 2
    assert "cpu:0" in text(page, "#devices") or "cuda:" in text(page, "#devices")
    # Two answers on, it knows rates.
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
    # Of scripts, of what the page asks for, and of what its own rules forbid.
    assert page.complaints == []
