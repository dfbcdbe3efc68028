"""The hint to install an extra is a command that works where semel came from."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from semel.runtime import extras

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


class _Installed:
    def __init__(self, noted: str | None) -> None:
        self.noted = noted

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.noted


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Installed:
    """semel as pip puts it, not a clone."""
    found = _Installed(None)
    monkeypatch.setattr(extras, "_SOURCE", tmp_path / "site-packages")
    monkeypatch.setattr(metadata, "distribution", lambda _name: found)
    return found


def test_in_a_clone_it_names_the_clone() -> None:
    assert extras.install_command("redis") == f'pip install -e "{ROOT}[redis]"'


def test_the_command_is_one_that_pip_takes() -> None:
    words = extras.install_command("redis").replace('"', "").split()
    pip = [sys.executable, "-m", *words, "--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    answer = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_installed_from_a_folder_it_names_the_folder(installed: _Installed, tmp_path: Path) -> None:
    folder = tmp_path / "my clone"
    installed.noted = json.dumps({"url": folder.as_uri(), "dir_info": {}})
    assert extras.install_command("redis") == 'pip install "semel[redis]"', "it is gone"
    folder.mkdir()
    assert extras.install_command("redis") == f'pip install "{folder}[redis]"'


def test_installed_from_a_registry_it_names_the_package(installed: _Installed) -> None:
    assert installed.noted is None
    assert extras.install_command("redis") == 'pip install "semel[redis]"'


def test_every_hint_comes_from_here_and_names_an_extra() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert path.name == "extras.py" or not re.search(r"pip install", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "install_command":
                asked |= {each.value for each in node.args if isinstance(each, ast.Constant)}  # type: ignore[misc]
    assert len(asked) > 8
    assert asked - set(known["optional-dependencies"]) == set()


CLI = [
    f"semel.cli.{name}" for name in ("app", "bench.command", "consume", "demo", "filter", "listen", "outbox")
]
NEEDS_ONLY = {
    "": [
        "semel.asgi",
        "semel.brokers",
        "semel.inbox",
        "semel.ingest.webhooks",
        "semel.outbox",
        "semel.testing",
    ],
    "aiosqlite": ["semel.connections.sqlite"],
    "asyncpg": ["semel.connections.asyncpg"],
    "audit": [*CLI, "duckdb", "semel.cli.audit.command"],
    "bloom": ["rbloom", "semel.stores.bloom"],
    "celery": ["semel.integrations.celery"],
    "cli": CLI,
    "cloudevents": ["semel.brokers.cloudevents"],
    "django": ["semel.integrations.django", "semel.integrations.django.middleware"],
    "dramatiq": ["semel.integrations.dramatiq"],
    "ed25519": ["cryptography.hazmat.primitives.asymmetric.ed25519", "semel.ingest.webhook_schemes"],
    "fastapi": ["semel.fastapi"],
    "fastmcp": ["fastmcp", "semel.integrations.mcp"],
    "faststream": ["semel.integrations.faststream"],
    "flask": ["semel.integrations.flask"],
    "http": ["http_sf", "semel.asgi", "semel.wsgi"],
    "http-client": ["semel.stores.http"],
    "kafka": ["semel.brokers.kafka.source", "semel.outbox.sinks.kafka"],
    "mcp": ["mcp", "semel.integrations.mcp"],
    "nats": ["semel.brokers.nats", "semel.outbox.sinks.nats"],
    "otel": ["semel.observe.otel"],
    "postgres": ["semel.connections.psycopg", "semel.stores.postgres"],
    "prometheus": ["semel.observe.prometheus"],
    "rabbitmq": ["semel.brokers.rabbitmq", "semel.outbox.sinks.rabbitmq"],
    "redis": ["semel.brokers.redis_streams", "semel.outbox.sinks.redis", "semel.stores.redis"],
    "retry": ["semel.brokers.middleware", "stamina"],
    "server": [*CLI, "semel.server.app", "semel.server.serving"],
    "sqlalchemy": ["semel.connections.sqlalchemy"],
    "sqs": ["semel.brokers.sqs", "semel.outbox.sinks.sqs"],
    "streams": ["semel.streams", "semel.streams.rocks"],
    "taskiq": ["semel.integrations.taskiq"],
    "webhook": ["semel.outbox.sinks.webhook"],
    "websocket": ["semel.ingest.sockets"],
}
"""What can be imported where one extra is installed, and nothing else."""
ALONE = """
import importlib, sys
hidden, modules = (set(each.split(",")) for each in sys.argv[1:])
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
for module in sorted(modules):
    importlib.import_module(module)
"""


def distributions_of(extra: str) -> set[str]:
    """The distributions that pip installs for semel with this extra."""
    found: set[str] = set()
    waiting = [("semel", extra)]
    while waiting:
        name, chosen = waiting.pop()
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": chosen}):
                wanted = [(canonicalize_name(needed.name), each) for each in (needed.extras or {""})]
                waiting += [each for each in wanted if each[0] not in found or each[1]]
                found.add(wanted[0][0])
    return found


def test_every_extra_is_tried_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert NEEDS_ONLY.keys() == project["optional-dependencies"].keys() - {"all", "dev"} | {""}


@pytest.mark.parametrize("extra", NEEDS_ONLY)
def test_an_extra_alone_is_enough(extra: str) -> None:
    there = distributions_of(extra) | {"semel"}
    hidden = {
        name
        for name, owners in metadata.packages_distributions().items()
        if not there & {canonicalize_name(owner) for owner in owners}
    }
    command = [sys.executable, "-c", ALONE, ",".join(hidden), ",".join(NEEDS_ONLY[extra])]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]


@pytest.mark.parametrize(
    ("driver", "url", "extra"),
    [("psycopg", "postgresql://localhost/app", "postgres"), ("redis", "redis://localhost/0", "redis")],
)
def test_a_store_without_its_driver_names_the_extra(driver: str, url: str, extra: str) -> None:
    program = f"{ALONE}\nimport semel\nsemel.open({url!r}, consumer='c')"
    command = [sys.executable, "-c", program, driver, "semel"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    said = answer.stderr.splitlines()[-1]
    assert said.startswith("semel.errors.StoreUnknown"), answer.stderr[-2000:]
    assert extras.install_command(extra) in said
