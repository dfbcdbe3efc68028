"""Clients that others generate from the OpenAPI document compile, and the programs of the page run with them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from semel.server.app import create_app
from semel.server.settings import ServeSettings
from semel.stores.memory.store import MemoryStore
from tests.server.tools import serving, token_for
from tests.services.packages import go_environment
from tests.services.programs import GO, program

pytestmark = [pytest.mark.slow, pytest.mark.service, pytest.mark.timeout(600)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "other-languages.md"
NODE_TYPES = """
declare const process: { env: Record<string, string | undefined> };
"""
"""What the program needs of Node.js, whose types are a package of their own."""
STRICT = ["--strict", "--noEmit", "--target", "es2022", "--moduleResolution", "bundler", "--module", "esnext"]


def program_of_page(language: str) -> str:
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return str(found)


def write_document(folder: Path) -> None:
    document = create_app(ServeSettings(auth="none"), store=MemoryStore()).openapi()
    (folder / "semel.json").write_text(json.dumps(document))


def run(command: list[str], folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "NO_COLOR": "1", **env}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def check_program(command: list[str], folder: Path) -> None:
    """Its first run has the effect; the second one is a duplicate and gets the first one's value."""
    store = MemoryStore()
    token, _ = token_for(store)
    with serving(ServeSettings(port=0, auth="tokens"), store=store) as service:
        runs = [run(command, folder, SEMEL_URL=service.address, SEMEL_TOKEN=token) for _ in range(2)]
    assert [each.stdout for each in runs] == ["completed receipt 7\n", "duplicate: receipt 7\n"], runs


def test_typescript_compiles_and_runs(tmp_path: Path) -> None:
    write_document(tmp_path)
    (tmp_path / "node.d.ts").write_text(NODE_TYPES)
    written = tmp_path / "worker.mts"
    written.write_text(program_of_page("typescript"))
    node, generate = program("node"), Path(program("openapi-typescript")).resolve()
    compiler = str((Path(program("openapi-typescript")).parent / "tsc").resolve())
    options = ["semel.json", "-o", "semel.d.ts", "--default-non-nullable=false"]
    made = run([node, str(generate), *options], tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    compile_all = [node, compiler, *STRICT, "node.d.ts", "semel.d.ts", "worker.mts"]
    compiled = run(compile_all, tmp_path)
    assert (compiled.returncode, compiled.stdout) == (0, "")
    check_program([node, "worker.mts"], tmp_path)
    written.write_text(written.read_text().replace("consumer:", "consumers:"))
    assert "consumers" in run(compile_all, tmp_path).stdout


def test_go_compiles_and_runs(tmp_path: Path) -> None:
    write_document(tmp_path)
    go, generate = program("go"), program("oapi-codegen")
    modules = (GO / "go.mod").read_text(encoding="utf-8")
    (tmp_path / "go.mod").write_text(modules.replace("module semel/tests", "module shop"))
    shutil.copy(GO / "go.sum", tmp_path)
    (tmp_path / "semel").mkdir()
    written = tmp_path / "main.go"
    written.write_text(program_of_page("go"))
    options = ["-generate", "types,client", "-package", "semel", "-o", "semel/semel.go", "semel.json"]
    way = {"PATH": f"{Path(go).parent}{os.pathsep}{os.environ['PATH']}"}  # the generator formats by `go`
    environment = go_environment() | way
    made = run([generate, *options], tmp_path, **environment)
    assert made.returncode == 0, made.stderr
    checked = run([go, "vet", "./..."], tmp_path, **environment)
    assert checked.returncode == 0, checked.stderr  # the first run says what it downloads
    compiled = run([go, "build", "-o", "worker", "."], tmp_path, **environment)
    assert (compiled.returncode, compiled.stderr) == (0, "")
    check_program([str(tmp_path / "worker")], tmp_path)
    written.write_text(written.read_text().replace("Consumer:", "Consumers:"))
    assert "Consumers" in run([go, "vet", "."], tmp_path, **environment).stderr
