"""Servers in Java for tests: their jars come from Maven, named by a small file in `maven/`."""

import shutil
import subprocess
from pathlib import Path

from tests.services.packages import locked
from tests.services.server import Missing

POMS = Path(__file__).parent / "maven"
FETCH_S = 600


def command(pom: str, heap_mb: int, folder: Path) -> list[str]:
    """How to start a program of these jars: the class and its arguments follow."""
    java, mvn = shutil.which("java"), shutil.which("mvn")
    if java is None or mvn is None:
        raise Missing("install Java 17 and Maven (Debian: default-jre-headless, maven)")
    path = folder / "classpath"
    with locked("semel-maven"):
        fetched = subprocess.run(
            [mvn, "-q", "-B", "-f", str(POMS / f"{pom}.xml"), "dependency:build-classpath",
             f"-Dmdep.outputFile={path}"],
            capture_output=True, text=True, check=False, timeout=FETCH_S,
        )  # fmt: skip
    if fetched.returncode:
        raise Missing(f"Maven does not find the jars of {pom}: {fetched.stdout[-1000:]}")
    return [java, f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", path.read_text()]
