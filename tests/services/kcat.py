"""`kcat`, a Kafka client of others, from the path or the package manager."""

import shutil
import subprocess
from pathlib import Path

from tests.services import server
from tests.services.packages import found_or_installed
from tests.services.server import Missing, State


def kcat(*arguments: str, given: str = "") -> str:
    """Run it to its end; what it read."""
    program = server.shared("kcat", _find)["program"]
    ended = subprocess.run(
        [program, "-q", *arguments], input=given, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _find(_folder: Path) -> State:
    program = found_or_installed(lambda: shutil.which("kcat"), "kcat")
    if program is None:
        raise Missing("install kcat (Debian: kcat)")
    return {"program": program}
