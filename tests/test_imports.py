"""Imports point one way, the core touches nothing of the world, and `import semel` is cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

LAYERS: list[set[str]] = [
    {"errors", "types"},
    {"clock", "codec", "keys", "policy", "windows"},
    {"core"},
    {"connections", "observe", "runtime", "stores"},
    {"brokers", "client", "inbox", "ingest", "outbox", "streams"},
    {""},  # semel/__init__.py: the front door; nothing below it comes in through it
    {"__main__", "asgi", "cli", "fastapi", "http", "integrations", "server", "testing", "wsgi"},
]
"""Lowest first. A module imports from its own layer and from those before it."""

PURE = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "msgspec", "operator", "re", "semel", "struct", "types", "typing",
}  # fmt: skip
"""All that core may import; none of it knows a clock, a thread, chance or the outside."""

WORLD = {
    "asyncio", "concurrent", "http", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "secrets", "select", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading",
    "time", "urllib",
}  # fmt: skip
"""What no module that core stands on may import."""

HEAVY = [
    "aiobotocore", "aio_pika", "asyncpg", "boto3", "cloudevents", "confluent_kafka", "django", "fastapi", "http_sf",
    "httpx2", "nats", "opentelemetry", "orjson", "prometheus_client", "psycopg", "pydantic", "rbloom", "redis", "rich",
    "rocksdict", "sqlalchemy", "sqlite3", "starlette", "structlog", "typer", "uvicorn", "websockets",
]  # fmt: skip
"""Drivers, frameworks and whatever else costs start-up time; `import semel` loads none of them."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: dict[str, Path] = {module_name(path): path for path in sorted(SOURCE.glob("semel/**/*.py"))}


def imported(module: str, tree: ast.Module, *, deferred: bool) -> Iterator[str]:
    """Yield the modules that one module imports; `deferred`: those inside functions and TYPE_CHECKING too."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not deferred:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not deferred:
                pending.extend(node.orelse)
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                if level:
                    raise AssertionError(f"{module}, line {node.lineno}: import by the full name")
                assert source is not None
                yield from (
                    full if (full := f"{source}.{alias.name}") in MODULES else source for alias in names
                )
            case _:
                pending.extend(ast.iter_child_nodes(node))


def imports_of(module: str, *, deferred: bool) -> set[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return set(imported(module, tree, deferred=deferred)) - {module}


def part(module: str) -> str:
    """The name of the layer's entry: `semel.core.flows` is in `core`, `semel` itself is ``."""
    return module.removeprefix("semel").removeprefix(".").split(".")[0]


def rank(module: str) -> int:
    for number, layer in enumerate(LAYERS):
        if part(module) in layer:
            return number
    raise AssertionError(f"{module} is in no layer: say in LAYERS where it belongs")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    upward = {
        other
        for other in imports_of(module, deferred=True)
        if other.split(".")[0] == "semel" and rank(other) > rank(module)
    }
    assert upward == set()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imports_of(module, deferred=False) & MODULES.keys() for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_core_imports_only_what_is_pure() -> None:
    impure = {
        f"{module} imports {other}"
        for module in MODULES
        if part(module) == "core"
        for other in imports_of(module, deferred=True)
        if other.split(".")[0] not in PURE
    }
    assert impure == set()


def test_core_stands_on_nothing_that_touches_the_world() -> None:
    reached: set[str] = set()
    pending = [module for module in MODULES if part(module) == "core"]
    touching: set[str] = set()
    while pending:
        module = pending.pop()
        if module not in reached:
            reached.add(module)
            imports = imports_of(module, deferred=True)
            pending.extend(imports & MODULES.keys())
            touching |= {f"{module} imports {other}" for other in imports if other.split(".")[0] in WORLD}
    assert touching == set()


def test_import_semel_loads_no_driver_and_no_framework() -> None:
    script = "import sys; before = set(sys.modules); import semel; print(*(set(sys.modules) - before))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in answer.stdout.split()}
    assert "semel" in loaded
    assert sorted(loaded.intersection(HEAVY)) == []
