"""BokehJS as it lies in the installed package: its core, and the interface with which page.js draws."""

from pathlib import Path

import bokeh

_FOLDER = Path(bokeh.__file__).parent / "server" / "static" / "js"


def scripts() -> list[str]:
    """The scripts of a page with curves by Bokeh, in their order."""
    return [(_FOLDER / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]
