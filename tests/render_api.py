"""Write the page of public names from the modules: `python -m tests.render_api`."""

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/api.md"

MODULES = {
    "semel": "What most programs need.",
    "semel.errors": "Every error. `SemelError` is their base.",
    "semel.types": "Outcomes, records and the other values that pass through the API.",
    "semel.keys": "Where a key comes from.",
    "semel.client": "What clients return besides outcomes.",
    "semel.stores": "For authors of a store.",
    "semel.inbox": "The mark in the caller's own transaction.",
    "semel.outbox": "Messages in the caller's own transaction, and the relay that publishes them.",
    "semel.brokers": "Consume from a broker.",
    "semel.brokers.middleware": "Wrap handlers of a runner.",
    "semel.ingest.webhooks": "Receive webhooks.",
    "semel.ingest.sockets": "Receive from WebSockets.",
    "semel.ingest.event_table": "Persist events in a table.",
    "semel.asgi": "The `Idempotency-Key` for ASGI.",
    "semel.wsgi": "The `Idempotency-Key` for WSGI.",
    "semel.fastapi": "The `Idempotency-Key` for FastAPI.",
    "semel.http": "Rules that the three share.",
    "semel.observe.events": "What hooks are called with.",
    "semel.observe.logging": "A hook that logs.",
    "semel.observe.prometheus": "A hook that counts for Prometheus.",
    "semel.observe.otel": "A hook for OpenTelemetry.",
    "semel.observe.history": "A hook that keeps a history in files.",
    "semel.integrations.aws_lambda": "AWS Lambda.",
    "semel.integrations.celery": "Celery.",
    "semel.integrations.django": "Django.",
    "semel.integrations.dramatiq": "Dramatiq.",
    "semel.integrations.faststream": "FastStream.",
    "semel.integrations.flask": "Flask.",
    "semel.integrations.mcp": "MCP servers, FastMCP, and tools of agents.",
    "semel.integrations.taskiq": "Taskiq.",
    "semel.testing": "For tests of programs that use semel.",
    "semel.testing.queue": "An at-least-once queue in one process.",
    "semel.testing.faults": "Stores that fail on purpose.",
    "semel.testing.chaos": "Chaos for a handler, in real processes.",
    "semel.testing.pytest_plugin": "The fixture `chaos`.",
    "semel.testing.proxy": "A TCP proxy that fails on purpose.",
    "semel.testing.simulate": "The simulation: thousands of random schedules.",
    "semel.testing.explore": "The exploration: every schedule within bounds.",
    "semel.testing.histories": "Histories: record the calls of processes on a store, and explain every answer.",
    "semel.testing.store_contract": "The contract for a store of your own.",
    "semel.testing.broker_contract": "The contract for a broker of your own.",
}
"""The public modules, in the order of the page."""


def page() -> str:
    """Return the text of the page."""
    parts = [
        "# Public names\n\nMade from the modules by `make render`. What is not listed here may change.\n"
    ]
    for name, about in MODULES.items():
        module = importlib.import_module(name)
        rows = "".join(
            f"| `{each}` | {_kind(module, each)} | {_about(module, each)} |\n" for each in module.__all__
        )
        parts.append(f"## {name}\n\n{about}\n\n| name | kind | meaning |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def _kind(module: ModuleType, name: str) -> str:
    thing: Any = getattr(module, name)
    if inspect.ismodule(thing):
        return "module"
    if inspect.isclass(thing):
        return "error" if issubclass(thing, BaseException) else "class"
    return "function" if inspect.isroutine(thing) else "constant" if name.isupper() else "type"


def _about(module: ModuleType, name: str) -> str:
    thing: Any = getattr(module, name)
    documented = inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isroutine(thing)
    text = inspect.getdoc(thing) if documented else _text_below(module, name)
    assert text, f"{module.__name__}.{name} has no docstring"
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _text_below(module: ModuleType, name: str) -> str:
    """Return the string that follows an assignment, in the module that makes it."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(
            (each.asname or each.name) == name for each in node.names
        ):
            assert node.module is not None
            return _text_below(importlib.import_module(node.module), name)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return inspect.cleandoc(str(after.value.value))
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            return f"`{ast.unparse(value)}`" if value is not None else ""
    return ""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
