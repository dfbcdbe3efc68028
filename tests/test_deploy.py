"""What `deploy/` names exists in the program: commands, options, ports, paths, extras; systemd accepts the units."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from semel.cli.app import app
from semel.server.settings import PORT
from tests.services.programs import program

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
