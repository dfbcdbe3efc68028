"""Run examples in environments of frameworks that do not go with the packages of development."""

import os
import subprocess
from pathlib import Path

from tests.services.programs import program

ROOT = Path(__file__).resolve().parents[2]


def run_in(environment: str, *arguments: str, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the interpreter of an environment on the examples; their records and ledger are in the folder."""
    places = {"STORE": f"sqlite:///{folder}/records.db", "LEDGER": str(folder / "ledger")}
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [program(environment), *arguments],
        cwd=folder, env={**os.environ, **places, **path, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def ledger(folder: Path) -> list[str]:
    """The effects that happened."""
    return sorted((folder / "ledger").read_text().split())
