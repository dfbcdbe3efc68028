"""The habits of this codebase, held by rules that may only be tightened.

Each rule is a function of one file, and each is shown to catch what it is for.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
PROSE_COLUMNS_MAX = 100

Rule = Callable[[str, str], Iterator[str]]
"""Takes a file's path inside the project and its text; yields what is wrong."""

MAY_PROMISE = {"docs/explain/guarantees.md"}
"""Where the strongest promise may be named: the page that is rendered from the tested table."""

MAY_REACH_INTO = {
    "src/semel/connections/sqlite.py",  # aiosqlite has no public way to run several statements in its thread
    "src/semel/testing/broker_operations.py",
    "src/semel/testing/queue.py",
}
"""Modules that still use private members of other objects. No module is added."""

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/")
GENERATED = {"docs/explain/guarantees.md"}
"""Pages that `make render` writes, beside those in docs/reference/cli, which are code blocks."""

# Put together from halves, so that this file passes its own rules.
NOTE_TO_SELF = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
HOME_PATH = re.compile(r"(?<![\w.~-])/(?:ho" + r"me|Us" + r"ers|ro" + r"ot)/\w")
REGISTRY_HOST = re.compile(
    r"(?:py" + r"pi\.org|python" + r"hosted\.org|registry\.npm" + r"js|npm" + r"js\.com)"
)
SLEEP = re.compile(r"\btime\.sl" + r"eep\(|\bfrom time import\b.*\bsl" + r"eep\b")
PRIVATE = re.compile(r"no" + r"qa:.*SLF" + r"001")
PROMISE = re.compile(r"exactly[\s_-]+once", re.IGNORECASE)

SKIPPED_FOLDERS = {"build", "dist", "htmlcov", "__pycache__", "node_modules"}
SUFFIXES = {
    "", ".cfg", ".css", ".html", ".ini", ".js", ".json", ".lua", ".md", ".py", ".pyi", ".sh", ".sql",
    ".svg", ".toml", ".txt", ".typed", ".yaml", ".yml",
}  # fmt: skip


@lru_cache(maxsize=1)
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return the module and all that is in it; the rules look at one file after the other."""
    return tuple(ast.walk(ast.parse(text)))


def module_is_short(path: str, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MODULE_LINES_MAX:
        yield f"{lines} lines: a module past {MODULE_LINES_MAX} has two jobs"


def module_says_its_job(path: str, text: str) -> Iterator[str]:
    docstring = ast.get_docstring(nodes_of(text)[0])  # type: ignore[arg-type]  # the module
    if not docstring:
        yield "no docstring; its first line says the module's one job"
    elif not docstring.splitlines()[0].endswith("."):
        yield "the first line of the docstring does not end with a full stop"


def functions_fit_a_screen(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"line {node.lineno}: {node.name} has {lines} lines; {FUNCTION_LINES_MAX} fit a screen"


def durations_carry_their_unit(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        if name in {"ttl", "timeout"}:
            yield f"line {node.lineno}: {name!r}: say of what, and in which unit: lease_s, window_s"


def values_are_never_unpickled(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        match node:
            case ast.Import(names=names):
                modules = {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                modules = {module.split(".")[0]}
            case _:
                continue
        for module in modules & {"cloudpickle", "dill", "marshal", "pickle", "shelve"}:
            yield f"line {node.lineno}: imports {module}, which runs what it reads"


def uses_its_own_random_numbers(path: str, text: str) -> Iterator[str]:
    for node in nodes_of(text):
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr=name):
                names = {name}
            case ast.ImportFrom(module="random", names=imported):
                names = {alias.name for alias in imported}
            case _:
                continue
        if names - {"Random", "SystemRandom"}:
            yield f"line {node.lineno}: the program's global generator; use semel.runtime.jitter"


def sleeps_nowhere(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if SLEEP.search(line):
            yield f"line {number}: sleeps; advance a clock or await a signal"


def no_notes_to_self(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if NOTE_TO_SELF.search(line):
            yield f"line {number}: a note to self; do it or write it down as an issue"


def speaks_of_no_computer(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if HOME_PATH.search(line):
            yield f"line {number}: a path of somebody's computer"
        if REGISTRY_HOST.search(line):
            yield f"line {number}: the host of a package registry; name the package alone"


def promises_only_what_is_tested(path: str, text: str) -> Iterator[str]:
    if path not in MAY_PROMISE:
        for match in PROMISE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line}: {match.group()!r} is said only where the tested table is shown"


def prose_is_wrapped(path: str, text: str) -> Iterator[str]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_prose = not fenced and not line.lstrip().startswith("|") and "](" not in line
        if is_prose and len(line) > PROSE_COLUMNS_MAX and path not in GENERATED:
            yield f"line {number}: {len(line)} columns; wrap prose at {PROSE_COLUMNS_MAX}"


def reaches_into_nothing_private(path: str, text: str) -> Iterator[str]:
    if path in MAY_REACH_INTO:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if PRIVATE.search(line):
            yield f"line {number}: a private member of another object; give it a public method or a function"


SOURCE_RULES: list[Rule] = [
    module_is_short,
    module_says_its_job,
    functions_fit_a_screen,
    durations_carry_their_unit,
    values_are_never_unpickled,
    uses_its_own_random_numbers,
    reaches_into_nothing_private,
]
TEST_RULES: list[Rule] = [sleeps_nowhere]
TREE_RULES: list[Rule] = [no_notes_to_self, speaks_of_no_computer, promises_only_what_is_tested]
DOCUMENT_RULES: list[Rule] = [prose_is_wrapped]

WRONG: list[tuple[Rule, str]] = [
    (module_is_short, "x = 1\n" * (MODULE_LINES_MAX + 1)),
    (module_says_its_job, "x = 1\n"),
    (module_says_its_job, '"""Does a thing"""\n'),
    (functions_fit_a_screen, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (functions_fit_a_screen, "class C:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION_LINES_MAX),
    (durations_carry_their_unit, "def f(*, ttl=1): ..."),
    (durations_carry_their_unit, "class C:\n    timeout: float = 1.0"),
    (values_are_never_unpickled, "import pickle"),
    (values_are_never_unpickled, "def f():\n    from pickle import loads"),
    (uses_its_own_random_numbers, "import random\nrandom.uniform(0, 1)"),
    (uses_its_own_random_numbers, "from random import choice"),
    (reaches_into_nothing_private, "once._plan  # no" + "qa: SLF" + "001 - one mechanism"),
    (sleeps_nowhere, "time.sl" + "eep(1)"),
    (sleeps_nowhere, "from time import monotonic, sl" + "eep"),
    (no_notes_to_self, "x = 1  # TO" + "DO: more"),
    (speaks_of_no_computer, "open('/ho" + "me/me/events.db')"),
    (speaks_of_no_computer, "https://py" + "pi.org/simple"),
    (promises_only_what_is_tested, "delivers exactly" + "-once"),
    (promises_only_what_is_tested, "delivers Exactly" + "\nonce"),
    (prose_is_wrapped, "word " * 30),
    (prose_is_wrapped, "```\ncode\n```\n" + "word " * 30),
]


def project_files() -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if is_shown(name) and name not in SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(files) if is_shown(name)):
            if path.suffix in SUFFIXES:
                yield path.relative_to(ROOT).as_posix(), path


def is_shown(name: str) -> bool:
    return not name.startswith(".") or name in {".ci", ".gitignore"}


def broken(rules: list[Rule], folder: str, suffix: str = "") -> list[str]:
    return [
        f"{name}: {what}"
        for name, path in project_files()
        if name.startswith(folder) and name.endswith(suffix)
        for text in [path.read_text(encoding="utf-8")]
        for rule in rules
        for what in rule(name, text)
    ]


def test_source_is_tidy() -> None:
    assert broken(SOURCE_RULES, "src/semel/", ".py") == []


def test_tests_do_not_sleep() -> None:
    assert broken(TEST_RULES, "tests/", ".py") == []


def test_tree_is_tidy() -> None:
    assert broken(TREE_RULES, "") == []


def test_documents_are_tidy() -> None:
    assert [what for what in broken(DOCUMENT_RULES, "", ".md") if what.startswith(DOCUMENTS)] == []


@pytest.mark.parametrize("text", ["```\n" + "word " * 30 + "\n```", "| " + "word " * 30 + "|"])
def test_code_and_tables_are_not_wrapped(text: str) -> None:
    assert list(prose_is_wrapped("some/page.md", text)) == []


def test_the_tree_is_looked_at() -> None:
    names = {name for name, _ in project_files()}
    assert {"Makefile", ".ci/run", "pyproject.toml", "tests/test_tidy.py", "src/semel/errors.py"} <= names


@pytest.mark.parametrize(("rule", "text"), WRONG)
def test_each_rule_catches_what_it_is_for(rule: Rule, text: str) -> None:
    assert list(rule("some/file.py", text)) != []


def test_every_rule_is_shown_to_catch() -> None:
    assert {rule for rule, _ in WRONG} == {*SOURCE_RULES, *TEST_RULES, *TREE_RULES, *DOCUMENT_RULES}
