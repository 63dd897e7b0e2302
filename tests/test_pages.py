"""What the pages and the comments point to exists: paths, modules, links, and the order of imports."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.test_imports import LAYERS

ROOT = Path(__file__).parent.parent
DESIGN = ROOT / "docs" / "design.md"
HISTORY = ROOT / "CHANGELOG.md"
"""It also names what was."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SOURCES = sorted(path for folder in ("specdec", "experiments", "conf") for path in (ROOT / folder).rglob("*.*"))
TEXTS = [path for path in [*PAGES, *SOURCES] if path.suffix in (".md", ".py", ".c", ".yaml") and path != HISTORY]
PATH = re.compile(r"(?<![\w./-])(?:specdec|experiments|tests|conf|docs)/[\w./*-]*\w")
MODULE = re.compile(r"(?<![\w./-])(?:specdec|experiments)(?:\.[a-zA-Z]\w*)+")
LINK = re.compile(r"\]\((?!https:)([^)\s]+)\)")
STANDS_FOR = "NAME"
"""`specdec/drafters/NAME.py` is a file that the reader will write, in a folder that exists."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def exists(path: str) -> bool:
    return any(ROOT.glob(path)) or (STANDS_FOR in path and (ROOT / path).parent.is_dir())


def resolves(dotted: str) -> bool:
    """A module, or what one defines."""
    try:
        resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def anchors(page: Path) -> set[str]:
    """The headings, as links into the page spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    to = (page.parent / path).resolve() if path else page
    return to.exists() and (not anchor or anchor in anchors(to))


@pytest.mark.parametrize("text", TEXTS, ids=named)
def test_what_a_text_names_exists(text: Path) -> None:
    read = text.read_text()
    assert [path for path in PATH.findall(read) if not exists(path)] == []
    assert [module for module in MODULE.findall(read) if not resolves(module)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [link for link in LINK.findall(page.read_text()) if not leads_somewhere(page, link)] == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert listed >= {page.resolve() for page in PAGES} - {index.resolve()}


def test_the_design_draws_the_rooms_that_are_there() -> None:
    layout = DESIGN.read_text().split("```")[1]
    drawn = set(re.findall(r"^  (\w+)/ ", layout, re.MULTILINE))
    there = {path.parent.name for path in (ROOT / "specdec").glob("*/__init__.py")}
    assert drawn == there
    files = {
        path.name for folder in ("specdec", "experiments", "conf", "docs") for path in (ROOT / folder).rglob("*.*")
    }
    assert set(re.findall(r"\w+\.(?:py|c|md|yaml)\b", layout)) <= files


def test_the_design_states_the_order_that_imports_keep() -> None:
    rows = re.findall(r"^\| \d+ \| (.*) \|$", DESIGN.read_text(), re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == LAYERS
