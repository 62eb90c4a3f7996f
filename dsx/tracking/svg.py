"""Turn a matplotlib figure into SVG that can stand inside a page and follow its colours.

Figures are drawn in placeholder colours; in the SVG those become CSS variables, so that one
drawing serves the light and the dark page.
"""

import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

INK = "#010101"
FAINT = "#020202"
SERIES = tuple(f"#0303{index:02x}" for index in range(1, 9))

_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, start=1)
}

STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


def series_colour(index: int) -> str:
    """The placeholder of the index-th line; colours repeat after eight."""
    return SERIES[index % len(SERIES)]


def to_svg(figure: Figure, name: str, description: str) -> str:
    """An `<svg>` element for a page.

    `name`: letters, digits and dashes; keeps the element's ids apart from other figures'.
    `description`: read aloud by screen readers; plain text, escaped by the caller.
    """
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name, **STYLE}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # The drawing takes the width that the page gives it.
    text = re.sub(r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    return text.replace(">", f"><title>{description}</title>", 1).strip()
