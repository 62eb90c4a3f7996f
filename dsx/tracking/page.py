"""The frame of an HTML page that carries all it needs, light or dark as the reader's system is."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

MARK = '<meta name="generator" content="dsx report">'
# The --series colours are told apart by colour-blind readers, too (after Okabe and Ito). They are
# the variables that `dsx.tracking.svg` leaves in the drawings.
CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1d2330; --faint: #c9ced8; --soft: #5b6474; --row: #f4f6f9;
  --series-1: #0072b2; --series-2: #d55e00; --series-3: #009e73; --series-4: #b65a94;
  --series-5: #e0a100; --series-6: #45a5d8; --series-7: #6a4fa3; --series-8: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --ink: #e4e8ef; --faint: #3b4453; --soft: #9aa4b5; --row: #1a2029;
    --series-1: #4ba3e0; --series-2: #f08a3c; --series-3: #35c79d; --series-4: #dd93bf;
    --series-5: #f2c440; --series-6: #8fd0f5; --series-7: #a996e0; --series-8: #a3adbb;
  }
}
body {
  margin: 0 auto; padding: 1.5rem; max-width: 76rem;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 0.2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.6rem; }
p { color: var(--soft); margin: 0 0 1.2rem; }
.plots {
  display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr));
}
figure.wide { grid-column: 1 / -1; }
figure { margin: 0; border: 1px solid var(--faint); border-radius: 8px; padding: 0.5rem; }
figure svg { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0.5rem; vertical-align: top; }
thead th { border-bottom: 2px solid var(--faint); }
tbody th { font-weight: 500; color: var(--soft); }
tbody tr:nth-child(odd) { background: var(--row); }
td { overflow-wrap: anywhere; }
details { margin-top: 2rem; }
summary { cursor: pointer; font-size: 1.15rem; font-weight: 600; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole page. `title` is escaped here, `body` holds finished HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{MARK}\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Without an icon of its own a browser asks the server for one.
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def is_page(path: Path) -> bool:
    """Whether that file is such a page, which a newer one may replace."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(500)


def section(title: str, content: str) -> str:
    """A heading over finished HTML."""
    return f"<h2>{escape(title)}</h2>\n{content}"


def folded(title: str, content: str) -> str:
    """Finished HTML that opens on a click."""
    return f"<details>\n<summary>{escape(title)}</summary>\n{content}\n</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts, each escaped here; the first cell of a row names it."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )
