"""The documents name what there is, and their links lead somewhere."""

import ast
import re
import shlex
import textwrap
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest
import typer.main

import semel
from semel import errors, windows
from semel.cli.app import app
from semel.observe import events
from semel.types import Outcome

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("deploy/*.md")]
)
EXTRA = re.compile(r"""extra `([a-z0-9-]+)`|pip install "\.\[([a-z0-9-]+)\]\"""")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BASES = {"DeliveryEvent", "Hook", "HookEvent", "Hooks", "Reason"}
"""Of hook events: what they have in common, and what hears them."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = {"", "console", "sh"}
COMMANDS: Any = typer.main.get_group(app)
INLINE = re.compile(r"`(semel [a-z-][^`]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text()


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_explained(name: str) -> None:
    assert f"`{name}`" in page("errors.md")
    assert f"\n### {name}\n" in (ROOT / "docs" / "howto" / "troubleshoot.md").read_text()


@pytest.mark.parametrize("name", [each for each in events.__all__ if each[0].isupper() and each not in BASES])
def test_every_hook_event_is_explained(name: str) -> None:
    assert re.search(rf"`{name}[`(]", page("events.md"))


@pytest.mark.parametrize("name", semel.Policy.__struct_fields__)
def test_every_option_is_explained(name: str) -> None:
    assert f"`{name}`" in page("policy.md")


def test_every_preset_is_explained() -> None:
    for preset, duration in windows.PRESETS.items():
        assert f"`{preset}` {duration}" in page("policy.md")


def test_every_outcome_is_explained() -> None:
    names = {(get_origin(part) or part).__name__ for part in get_args(Outcome)}
    assert len(names) == 9
    for name in names:
        assert f"`{name}(" in page("outcomes.md")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_in_examples_resolve(path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    imports = [
        (node.module, alias.name)
        for block in blocks
        for node in ast.walk(ast.parse(textwrap.dedent(block)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "semel"
        for alias in node.names
    ]
    missing = [
        f"{module}.{name}"
        for module, name in imports
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "docs" / "index.md", ROOT / "README.md"]
    while waiting:
        current = waiting.pop().resolve()
        if current in reached or current.suffix != ".md" or not current.exists():
            continue
        reached.add(current)
        waiting += [
            current.parent / target for target in LINK.findall(current.read_text()) if "://" not in target
        ]
    assert [str(path.relative_to(ROOT)) for path in PAGES if path.resolve() not in reached] == []


def test_the_index_lists_every_page_with_a_line() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", index.read_text(encoding="utf-8"), re.MULTILINE)
    folders_with_an_index = {"cli": "index.md", "decisions": "README.md"}
    expected = {
        path.relative_to(index.parent).as_posix()
        for path in index.parent.rglob("*.md")
        if path != index and folders_with_an_index.get(path.parent.name, path.name) == path.name
    }
    assert expected - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_every_extra_that_a_page_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    named = {name for text in texts for found in EXTRA.findall(text) for name in found if name}
    assert len(named) > 5
    assert named - set(project["optional-dependencies"]) == set()
    assert not [text for text in texts if re.search(r"install ['\"]?semel", text)], "there is no release yet"


def test_every_field_of_the_python_reference_has_a_meaning() -> None:
    rows = [line for line in page("python.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\| +\|$", row)] == []


def commands_on_a_page(text: str) -> list[list[str]]:
    """The commands of semel on a page, in its consoles and in its lines, as words; without pipes and remarks."""
    blocks = [block.replace("\\\n", " ") for kind, block in FENCED.findall(text) if kind in SHELLS]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += [" ".join(line.split()) for line in INLINE.findall(FENCED.sub("", text))]
    found = [re.sub(r" [|<>#]( .*|$)|;.*|  .*", "", line) for line in lines if re.match("semel [a-z-]", line)]
    return [shlex.split(line)[1:] for line in found if line.count("'") % 2 == line.count('"') % 2 == 0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_on_a_page_and_their_options_exist(path: Path) -> None:
    for words in commands_on_a_page(path.read_text(encoding="utf-8")):
        command = COMMANDS
        rest = [word.partition("=")[0] for word in words]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        if hasattr(command, "commands") and rest and rest[0][0] != "-":  # several of a group
            assert set(rest.pop(0).split("|")) <= command.commands.keys(), words
        own = rest[:2] if words[0] == "once" else rest  # then another program's
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        known |= {"--help", "--install-completion"}
        assert {word for word in own if re.match(r"--?[a-z]", word)} <= known, words


def test_commands_are_found_on_the_pages() -> None:
    text = (ROOT / "docs/howto/operate.md").read_text(encoding="utf-8")
    found = commands_on_a_page(text)
    assert ["consumer", "set-mode", "billing", "quarantine"] in found
    assert len([words for path in PAGES for words in commands_on_a_page(path.read_text("utf-8"))]) > 300


def test_every_line_of_the_threat_model_names_its_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## Threat model")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 16
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            (path,) = ROOT.glob(f"tests/*/{file}")
            assert f"def {test}(" in path.read_text(), (file, test)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_examples_import_is_there(path: Path) -> None:
    for block in PYTHON.findall(path.read_text()):
        nodes = list(ast.walk(ast.parse(block)))
        names: dict[str, Any] = {"semel": semel}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "semel":
                exec(ast.unparse(node), names)
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = names.get(node.value.id)
                assert not isinstance(owner, ModuleType) or hasattr(owner, node.attr), ast.unparse(node)
