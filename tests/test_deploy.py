"""What `deploy/` names exists in the program: commands, options, ports, paths, extras; systemd accepts the units."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate  # type: ignore[import-untyped]
import psycopg
import pytest
import typer.main
import yaml

from semel.cli.app import app
from semel.server.settings import PORT
from tests.services import postgres, redis, server
from tests.services.programs import program
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMMANDS: dict[str, Any] = typer.main.get_group(app).commands  # type: ignore[assignment]


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")))


def check_command(words: list[str]) -> None:
    """The command exists, and so do its options."""
    command = COMMANDS[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.service
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    units = sorted((DEPLOY / "systemd").iterdir())
    assert len(units) == 5
    for unit in units:
        text = unit.read_text(encoding="utf-8")
        for line in re.findall(r"^ExecStart=/opt/semel/bin/semel (.+)$", text, re.MULTILINE):
            check_command(line.split())
        (tmp_path / unit.name).write_text(
            text.replace("/opt/semel/bin/semel", sys.executable), encoding="utf-8"
        )
    names = [str(tmp_path / unit.name) for unit in units]
    answer = subprocess.run(
        [analyze, "verify", "--man=no", *names], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_the_manifests_fit_the_program() -> None:
    found = {each["kind"]: each for each in documents("kubernetes/semel.yaml")}
    assert found.keys() == {"Deployment", "Service", "PodDisruptionBudget", "CronJob"}
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_command(container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    health = (ROOT / "src/semel/server/routes/health.py").read_text(encoding="utf-8")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in health
    (job,) = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    check_command(job["args"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert job["image"] == container["image"] == f"semel:{project['version']}"
    (monitor,) = documents("kubernetes/podmonitor.yaml")
    labels = pod["metadata"]["labels"]
    selectors = [found["Service"]["spec"]["selector"], monitor["spec"]["selector"]["matchLabels"]]
    assert [*selectors, found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]] == [labels] * 3


def test_the_manifests_fit_the_schemas_of_kubernetes() -> None:
    for document in documents("kubernetes/semel.yaml"):
        kubernetes_validate.validate(document, "1.33", strict=True)
        document["spec"]["replica"] = 1  # no such field
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, "1.33", strict=True)


def test_compose_names_what_there_is() -> None:
    (compose,) = documents("docker/compose.yaml")
    folder = DEPLOY / "docker"
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (folder / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
    check_command(compose["services"]["purge"]["command"])
    assert (folder / compose["services"]["semel"]["build"]["context"]).resolve() == ROOT


@pytest.mark.timeout(600)
@pytest.mark.service
@pytest.mark.slow
def test_the_reader_of_docker_accepts_the_compose_file(tmp_path: Path) -> None:
    program("go")
    read = [program("compose-go"), "-format", "json"]
    folder = DEPLOY / "docker"
    answer = subprocess.run(
        [*read, "compose.yaml"],
        cwd=folder,
        env={"COMPOSE_PROFILES": "fleet"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    (compose,) = documents("docker/compose.yaml")
    assert json.loads(answer.stdout)["services"].keys() == compose["services"].keys()
    text = (folder / "compose.yaml").read_text(encoding="utf-8").replace("replicas: 5", "replica: 5")
    (tmp_path / "compose.yaml").write_text(text, encoding="utf-8")
    wrong = subprocess.run(
        [*read, "compose.yaml"], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert "replica" in wrong.stderr


@pytest.mark.timeout(600)
@pytest.mark.service
@pytest.mark.slow
def test_the_fleet_of_compose_writes_each_event_once(tmp_path: Path) -> None:
    (compose,) = documents("docker/compose.yaml")
    listener = compose["services"]["listener"]
    assert compose["services"]["source"]["entrypoint"] == ["python", "/source.py"]
    events, port = 20, server.free_port()
    name = f"fleet_{uuid4().hex[:12]}"
    postgres.execute(postgres.url(), f"CREATE DATABASE {name}")
    database = f"{postgres.url().rpartition('/')[0]}/{name}"
    (tmp_path / "store_url").write_text(database)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PAUSE_S": "0.02"}
    env |= listener["environment"] | {"SEMEL_STORE": redis.place("fleet"), "EVENTS": str(events)}
    put = {"$$": "$", "/run/secrets": str(tmp_path), "source:8765": f"127.0.0.1:{port}"}
    command = [replace_all(word, put) for word in listener["entrypoint"]]
    source = [sys.executable, str(DEPLOY / "docker" / "source.py")]
    running = [subprocess.Popen(source, env={**env, "ADDRESS": f"127.0.0.1:{port}"})]
    running += [
        subprocess.Popen(command, env=env, cwd=tmp_path) for _ in range(listener["deploy"]["replicas"])
    ]
    try:
        with psycopg.connect(database, autocommit=True) as connection:
            assert await_true(lambda: count_events(connection) == (events, events))
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert len(running) == 6


def count_events(connection: "psycopg.Connection[Any]") -> tuple[int, int]:
    """Rows, and different events among them."""
    try:
        row = connection.execute("SELECT count(*), count(DISTINCT event_id) FROM events").fetchone()
    except psycopg.errors.UndefinedTable:  # no listener is that far
        return (0, 0)
    assert row is not None
    return row[0], row[1]


def replace_all(text: str, put: dict[str, str]) -> str:
    for old, new in put.items():
        text = text.replace(old, new)
    return text


def test_the_image_is_made_of_what_there_is() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert set(wanted.split(",")) <= extras.keys()
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert copied
    allowed = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
    assert f"EXPOSE {PORT}" in text


def test_the_readme_says_of_each_part_how_far_it_was_tried() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    parts = {path.relative_to(DEPLOY).parts[0] for path in DEPLOY.rglob("*") if path.is_file()} - {
        "README.md"
    }
    assert {part for part in parts if f"]({part}/" not in text and f"]({part})" not in text} == set()
