"""The site: links that lead somewhere, every page in the navigation, and a strict build where Sphinx is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs/site"))

import reference  # noqa: E402

WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[Path, str]:
    """Path -> text without code, of every page; those of the reference where a build of the site has them."""
    folder = tmp_path_factory.mktemp("reference")
    reference.write(folder)
    found = {path: path.read_text(encoding="utf-8") for path in WRITTEN}
    found |= {ROOT / "docs/reference" / path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    return {path: re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S) for path, text in found.items()}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def broken(pages: dict[Path, str]) -> list[str]:
    """Links and images that lead nowhere."""
    found = []
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            there = path in pages or path.exists()
            if not there or (anchor and anchor not in anchors(pages.get(path, ""))):
                found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def test_no_link_is_dead(pages):
    assert broken(pages) == []


def test_a_dead_link_would_be_found():
    page = ROOT / "docs/x.md"
    text = "# A heading: `x`\n[a](none.md) [b](#a-heading-x) [c](#other) [d](index.md#nothing) `[e](none.md)`"
    assert broken({page: text}) == ["docs/x.md: none.md", "docs/x.md: #other", "docs/x.md: index.md#nothing"]


def test_pages_that_code_and_notebooks_name_exist():
    """No link, but words to a reader all the same: `docs/depth.md` in a docstring, a script or a notebook."""
    named = set()
    for folder in ("dreamer_jax", "pallas_kernels", "launch", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".yaml", ".ipynb", ".md"):
                text = path.read_text(encoding="utf-8")
                named |= set(re.findall(r"(?<![\w/.])(?:docs/\w+\.md|launch/[\w/]+\.(?:sh|ipynb))", text))
    assert len(named) > 20 and sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_page_stands_once_in_the_navigation():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```{toctree}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    named = re.findall(r"<(\S+)>$", "\n".join(trees), re.MULTILINE)
    there = {path.stem for path in WRITTEN if path.parent.name == "docs"} - {"index"}
    assert sorted(named) == sorted(there | {f"reference/{name}" for name in reference.PAGES})


def test_the_site_builds_strictly_and_asks_no_network(tmp_path):
    """What `bash launch/docs.sh` does, which continuous integration runs; skipped without the extra `docs`."""
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("needs the extra docs; launch/docs.sh builds in an environment of its own")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-c", "docs/site", "-W", "--keep-going", "-q", "docs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert loaded == [], page.name
