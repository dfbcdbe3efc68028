"""Build the site: `python tools/site.py [FOLDER]` writes it to build/site, and fails on any warning.

The pages are laid out as in the repository, so that their links work there and here. Whatever file a page links to is
copied beside it. A link to a folder becomes a page that lists the folder. The navigation is docs/index.md.
"""

import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "site"
STYLE = ROOT / "tools" / "site.css"
WITHOUT_NAVIGATION = "---\nhide: [navigation]\n---\n"
"""The front page is the only one of its tab: its tables need the room."""
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "deploy/*.md")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)
GROUP = re.compile(r"^([A-Z][\w ]+):$", re.MULTILINE)


def stage(folder: Path) -> None:
    """Copy the pages and all that they link to."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)}):
        target = folder / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(linked_page(page, folder), "utf-8")
    front = folder / "README.md"
    front.write_text(WITHOUT_NAVIGATION + front.read_text("utf-8"), "utf-8")
    shutil.copy(STYLE, folder)


def linked_page(page: Path, folder: Path) -> str:
    """Return the text of a page, with links that work on the site."""
    return LINK.sub(lambda link: link_to(page, link, folder), page.read_text("utf-8"))


def link_to(page: Path, link: re.Match[str], folder: Path) -> str:
    """Return the link, after what it leads to was copied."""
    before, target, after = link.groups()
    linked = (page.parent / target).resolve()
    if "://" in target or not linked.exists():
        return link[0]
    inside = folder / linked.relative_to(ROOT)
    if linked.is_dir():
        inside.mkdir(parents=True, exist_ok=True)
        (inside / "index.md").write_text(listing(linked, inside), "utf-8")
        return f"{before}{target.rstrip('/')}/index.md{after}"
    if linked.suffix != ".md":
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(linked, inside)
    return link[0]


def listing(folder: Path, inside: Path) -> str:
    """Return a page that lists the files of a folder, after they were copied."""
    files = [each for each in sorted(folder.iterdir()) if each.is_file()]
    for each in files:
        shutil.copy(each, inside)
    return f"# {folder.name}\n\n" + "".join(f"- [{each.name}]({each.name})\n" for each in files)


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the navigation: the sections of the index, with their groups and pages in order."""
    sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    parts: list[dict[str, Any]] = [{"semel": "README.md"}]
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        first, *groups = GROUP.split(text)
        grouped = [{name: entries(part)} for name, part in zip(groups[::2], groups[1::2], strict=True)]
        parts.append({title: [*entries(first), *grouped]})
    parts[1:1] = [{"All pages": "docs/index.md"}]
    return parts


def entries(text: str) -> list[dict[str, str]]:
    """Return the pages that a part of the index lists, by their names; the front page is not among them."""
    found = [(name, f"docs/{target}".replace("docs/../", "")) for name, target in ENTRY.findall(text)]
    return [{name: target} for name, target in found if target != "README.md"]


def build(out: Path) -> None:
    """Write the site. Raises `mkdocs.exceptions.Abort` if anything is to be warned of."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    source = out.parent / f"{out.name}-source"
    stage(source)
    nav = navigation((ROOT / "docs" / "index.md").read_text("utf-8"))
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(source), site_dir=str(out), nav=nav)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build_site(config)
    finally:
        config.plugins.on_shutdown()
        shutil.rmtree(source)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUT
    build(out)
    print(f"{out / 'index.html'}")
