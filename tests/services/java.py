"""Servers that run on Java: their jars by Maven, once for this computer, and a small heap for each."""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.services.server import Missing

JARS = Path(__file__).parent / "jars"
HEAP = "256m"


def command(name: str, main: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs a class of the jars that `jars/NAME.xml` lists."""
    java = shutil.which("java")
    if java is None:
        raise Missing("Java 17 or newer is not on the path; install a JRE (Debian: openjdk-17-jre-headless)")
    tuned = [f"-Xmx{HEAP}", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    return [java, *tuned, *options, "-cp", f"{_jars(name)}/*", main, *arguments]


def _jars(name: str) -> Path:
    """The folder with the jars, filled by Maven when it is not there yet."""
    listed = JARS / f"{name}.xml"
    mark = hashlib.sha256(listed.read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"semel-jars-{name}-{mark}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            maven = shutil.which("mvn")
            if maven is None:
                raise Missing(
                    "Maven is not on the path, and the jars have to come from somewhere; install maven"
                )
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            ended = subprocess.run(
                [maven, "-q", "-B", "-f", str(listed), "dependency:copy-dependencies", f"-DoutputDirectory={folder}"],
                capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            if ended.returncode != 0:
                raise Missing(
                    f"Maven could not fetch the jars of {name}: {(ended.stdout + ended.stderr)[-500:]}"
                )
            with contextlib.suppress(FileExistsError):
                (folder / ".complete").touch()
    return folder
