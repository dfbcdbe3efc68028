"""Write the Python reference from signatures and docstrings: `python -m tests.render_reference`."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/python.md"
WIDTH = 100
FIRST = ("run", "run_many", "guard", "claim")
"""The verbs that most programs use."""
QUOTED = re.compile(r"'([A-Z]\w*(?:\[\w+\])?)'")
"""A type that its source names before it is defined."""
CODE_WIDTH = 88

SECTIONS: dict[str, tuple[str, ...]] = {
    "Open a client": ("semel:open", "semel:aopen", "semel:tiered", "semel:migrating"),
    "The client": ("semel:Semel",),
    "Settings of a client": ("semel:Policy",),
    "Guarded functions": ("semel:Guarded",),
    "Outcomes": (
        "semel:Done", "semel:Busy", "semel:Errored", "semel:Failed", "semel:Mismatch", "semel:Lost",
        "semel:Late", "semel:Unknown", "semel:Unavailable", "semel:unwrap",
    ),
    "Inside a handler": ("semel:current", "semel:Context", "semel:step", "semel:NotApplied", "semel:GiveUp"),
    "Claims by hand": ("semel:Claimed", "semel:Completed", "semel:Renewed"),
    "Records and windows": (
        "semel.client.records:Records", "semel.client.records:Windows", "semel:Record", "semel:Cleaner",
    ),
    "Keys": (
        "semel.keys:of", "semel.keys:header", "semel.keys:path", "semel.keys:body", "semel.keys:cloudevent",
        "semel.keys:content", "semel.keys:sliding",
    ),
    "Inbox": ("semel.inbox:Inbox", "semel.inbox:inbox_for", "semel.inbox:retry", "semel.inbox:is_undone"),
    "Outbox": (
        "semel:Message", "semel.outbox.publish:Outbox", "semel.outbox:Relay", "semel.outbox:Retrying",
    ),
    "Brokers": ("semel.brokers:Runner", "semel.brokers:RunnerLimits", "semel:producer"),
    "HTTP": ("semel.asgi:IdempotencyMiddleware", "semel.http:Rules", "semel.http:Preset"),
    "Stores": (
        "semel.stores:store_for", "semel.stores:MemoryStore", "semel.stores:Store", "semel.stores:Capabilities",
    ),
    "Testing": (
        "semel.testing:ManualClock", "semel.testing.queue:Queue", "semel.testing.faults:TrapStore",
    ),
}  # fmt: skip
"""What the page describes, in its order: module and name."""


def page() -> str:
    """Return the text of the page."""
    about = (
        "Made from signatures and docstrings by `make render`. [Public names](api.md) lists every name."
        " `AsyncSemel`, `AsyncInbox` and their kin have the same methods, awaited."
    )
    parts = ["# Python reference\n", textwrap.fill(about, WIDTH) + "\n"]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for each in names:
            module, _, name = each.partition(":")
            parts.extend(_describe(getattr(importlib.import_module(module), name), name))
    return "\n".join(parts)


def _describe(thing: Any, name: str) -> Iterator[str]:
    yield f"### {name}\n"
    if not inspect.isclass(thing):
        yield _signature(thing, name)
        yield _text(inspect.getdoc(thing))
        return
    yield _text(inspect.getdoc(thing))
    if fields := list(_fields(thing)):
        yield "| field | type and default | meaning |\n|---|---|---|\n" + "".join(fields)
    for method in _methods(thing):
        found = inspect.getattr_static(thing, method)
        plain = found.fget if isinstance(found, property) else inspect.unwrap(getattr(thing, method))
        yield f"#### {name}.{method}\n"
        yield _signature(plain, method, a_property=isinstance(found, property))
        yield _text(inspect.getdoc(plain))


def _methods(owner: type) -> list[str]:
    """Return the names of the public, documented methods and properties, the most used ones first."""
    names: dict[str, None] = {}
    for each in owner.__mro__:
        if each.__module__.startswith("semel"):
            for name, value in vars(each).items():
                is_method = inspect.isroutine(value) or isinstance(
                    value, property | staticmethod | classmethod
                )
                if not name.startswith("_") and is_method:
                    names.setdefault(name)
    found = [name for name in names if inspect.getdoc(getattr(owner, name))]
    return sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _fields(owner: type) -> Iterator[str]:
    """Yield a row for each field of a struct, with the text below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            about = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                about = " ".join(inspect.cleandoc(str(after.value.value)).split())
            kind = ast.unparse(node.annotation) + (f" = {ast.unparse(node.value)}" if node.value else "")
            cells = (f"`{node.target.id}`", f"`{kind}`", about)
            yield "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |\n"


def _signature(function: Any, name: str, *, a_property: bool = False) -> str:
    """Return the head of a function as its source has it, without `self`."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if a_property:
        return f"```python\n{name}{returns.replace(' -> ', ': ', 1)}\n```\n"
    first = [*node.args.posonlyargs, *node.args.args][:1]
    if first and first[0].arg in ("self", "cls"):
        (node.args.posonlyargs or node.args.args).pop(0)
    head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    text = f"{head} {name}({ast.unparse(node.args)}){returns}: ..."
    if len(text) > CODE_WIDTH:
        text = f"{head} {name}(\n    {_split(ast.unparse(node.args))},\n){returns}: ..."
    text = QUOTED.sub(r"\1", text)
    return f"```python\n{text}\n```\n"


def _split(arguments: str) -> str:
    """Return the arguments with a line for each; commas inside of brackets stay."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(arguments):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(arguments[start:at].strip())
            start = at + 1
    return ",\n    ".join([*parts, arguments[start:].strip()])


def _text(doc: str | None) -> str:
    """Return a docstring as Markdown: wrapped paragraphs, and examples after `::` as code."""
    parts: list[str] = []
    for paragraph in (doc or "").split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
        elif paragraph.strip() != "::":
            parts.append(textwrap.fill(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
