"""Settings of Sphinx for the site; `bash launch/docs.sh` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import reference  # noqa: E402

project = "Dreamer-JAX"
version = release = reference.version()
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["site/**", "results/**"]
# Every heading has the anchor that GitHub gives it, so that a link works in both places.
myst_heading_anchors = 4
nitpicky = True
smartquotes = False  # a quote in a setting's meaning is to be typed as it stands
highlight_language = "text"

html_theme = "furo"
html_title = f"Dreamer-JAX {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# The fonts are the reader's own: nothing is fetched from a network.
FONTS = {
    "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
    "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
}
html_theme_options = {"light_css_variables": FONTS, "dark_css_variables": FONTS}


def setup(app):
    """The pages of the reference are written from the code before any page is read."""
    app.connect("config-inited", lambda *_: reference.write(HERE.parent / "reference"))
