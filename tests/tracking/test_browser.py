"""The report in a real browser, headless: nothing fails to load, and every plot is drawn."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsx.tracking.report import render_report
from tests.tracking.runs import write_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--enable-logging=stderr", "--v=0"),
)
MEASURE = """
<script>
const drawn = [...document.querySelectorAll('figure > svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('path, use, text')].filter(mark => {
    const size = mark.getBoundingClientRect();
    return size.width + size.height > 0;
  });
  return {id: svg.parentElement.id, width: box.width, height: box.height, marks: marks.length};
});
const style = getComputedStyle(document.body);
const answer = {drawn, page: style.backgroundColor, ink: style.color,
                over: document.documentElement.scrollWidth - innerWidth};
document.body.innerHTML = '<pre>' + JSON.stringify(answer) + '</pre>';
</script>
"""


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(
            "no browser: install one of "
            f"{', '.join(BROWSERS)} (Debian: apt-get install chromium), or leave this file out "
            "with --ignore tests/tracking/test_browser.py"
        )
    return found


def test_every_plot_is_drawn_in_light_and_dark_and_nothing_is_complained_of(
    tmp_path: Path,
) -> None:
    for name in ("one", "other"):
        write_run(tmp_path / name)
    text = render_report([tmp_path / "one", tmp_path / "other"])
    plots = re.findall(r'<figure id="([^"]+)"', text)
    pages = {}
    for scheme in ("light", "dark"):
        page = tmp_path / f"{scheme}.html"
        shown = (
            text
            if scheme == "light"
            else text.replace("prefers-color-scheme: dark", "min-width: 1px")
        )
        page.write_text(shown.replace("</body>", MEASURE + "</body>"))
        done = subprocess.run(
            [
                *(
                    browser(),
                    *FLAGS,
                    "--window-size=1200,900",
                    f"--user-data-dir={tmp_path / page.stem}",
                ),
                *("--dump-dom", page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        pages[scheme] = json.loads(re.findall(r"<pre>(.*)</pre>", done.stdout)[-1])
    for answer in pages.values():
        assert [plot["id"] for plot in answer["drawn"]] == plots
        assert all(plot["width"] > 300 and plot["height"] > 100 for plot in answer["drawn"])
        assert all(plot["marks"] > 20 for plot in answer["drawn"])
        assert answer["over"] <= 0  # nothing sticks out to the right
    assert pages["light"]["page"] != pages["dark"]["page"]
    assert pages["light"]["ink"] != pages["dark"]["ink"]
