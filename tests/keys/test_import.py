"""`semel.keys` costs nothing that it does not use."""

import subprocess
import sys
from pathlib import Path

import pytest

from semel import keys

SOURCE = Path(keys.__file__).parent
HEAVY = [
    "asyncio",
    "json",
    "orjson",
    "rfc8785",
    "uuid_utils",
    "urllib.parse",
    "dataclasses",
    "sqlite3",
    "redis",
    "pydantic",
]


def test_import_loads_no_reference_implementation_and_no_driver() -> None:
    program = f"import sys, semel.keys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.strip()
    allowed = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, msgspec; print([name for name in {HEAVY!r} if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert loaded == allowed


@pytest.mark.parametrize("name", keys.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert hasattr(keys, name)


def test_no_module_asks_for_the_time() -> None:
    for module in SOURCE.glob("*.py"):
        text = module.read_text(encoding="utf-8")
        for clock in ("import time", "datetime.now", "monotonic", "utcnow"):
            assert clock not in text, f"{module.name} reads a clock"
