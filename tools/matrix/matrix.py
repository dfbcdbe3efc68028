"""Run the tests on every Python that semel promises: `make matrix`.

Each Python except 3.12 comes with a Debian release. `debootstrap` creates a bare root of that release once, in a
folder outside the repository; the host's settings for apt and pip are copied into it before each run. Python 3.12
is in no Debian release: it runs on the host, if an interpreter is found.

Every run works on a clone of HEAD, in its own process and mount namespaces: when it ends in any way, the kernel
kills its processes and removes its mounts.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = "ca-certificates,git,make,python3,python3-venv"
"""The packages of a root; the tests install everything else that they need."""
TOOLS = {"debootstrap": "debootstrap", "git": "git", "setpriv": "util-linux", "unshare": "util-linux"}
"""Programs that this tool runs, and their Debian packages."""
PASSED_ON = re.compile(r"PIP_\w+|(https?|no|all)_proxy|\w*(SSL_CERT|CA_BUNDLE|CA_CERTS)\w*", re.IGNORECASE)
"""Environment variables with the addresses of package registries."""
APT_SETTING = re.compile(r"Acquire::(https?::|Retries|Check-Valid-Until|ForceIPv)", re.IGNORECASE)
HOST_FILES = ("/etc/hosts", "/etc/pip.conf", "/etc/resolv.conf")
HOME_FILES = (".config/pip/pip.conf", ".m2/settings.xml", ".pip/pip.conf")
CERTIFICATES = Path("/usr/local/share/ca-certificates")
FALLBACK_SCRIPT = "sid"
"""The script for releases whose names an older `debootstrap` does not know."""
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL_S, TEST_S = 3600, 3 * 3600


@dataclass(frozen=True)
class Target:
    """One Python to test on."""

    name: str
    python: str
    suite: str = ""
    """The Debian release that has this Python; empty: use an interpreter of the host."""


TARGETS = (
    Target("bookworm", "3.11", suite="bookworm"),
    Target("python3.12", "3.12"),
    Target("trixie", "3.13", suite="trixie"),
    Target("forky", "3.14", suite="forky"),
)


@dataclass(frozen=True)
class Result:
    """The result of one target's run."""

    target: Target
    verdict: str
    """`passed`, `FAILED` or `not run`."""
    details: str
    took_s: float


class Stopped(Exception):
    """A step failed; the message names it and says what to do."""


class Run:
    """The run of one target: its folder, its log, its commands."""

    def __init__(self, target: Target, cache: Path, arguments: str, jobs: str) -> None:
        self.target = target
        self._arguments = arguments
        self._jobs = jobs
        self._folder = cache / target.name
        self._root = self._folder / "root" if target.suite else Path("/")
        self._clone = self._root / "semel" if target.suite else self._folder / "semel"
        self._log = self._folder / "log"

    def __call__(self) -> Result:
        """Create what is missing, and run the tests."""
        started_at = time.monotonic()
        try:
            verdict, details = self._perform()
        except Stopped as stopped:
            verdict, details = "FAILED", str(stopped)
        return Result(self.target, verdict, details, time.monotonic() - started_at)

    def _perform(self) -> tuple[str, str]:
        python = "python3" if self.target.suite else find_interpreter(self.target.python)
        if python is None:
            return (
                "not run",
                f"no Python {self.target.python} found; name yours: PYTHON312=/path/to/python3.12",
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        self._say(f"log: {self._log}")
        if self.target.suite:
            self._make_root()
            self._copy_settings()
        self._clone_head()
        self._say("installing")
        self._inside(
            f"make venv PYTHON={shlex.quote(python)}",
            INSTALL_S,
            "the packages of the tests could not be installed",
        )
        version = self._inside(".venv/bin/python --version", 60, "the interpreter does not run").split()[-1]
        if not version.startswith(f"{self.target.python}."):
            raise Stopped(f"expected Python {self.target.python}, found {version}; remove {self._folder}")
        self._say(f"testing on Python {version}")
        options = f"--install -n {self._jobs} --dist worksteal --hypothesis-profile=ci {self._arguments}"
        tested = self._inside(f".venv/bin/python -m pytest {options}", TEST_S, f"Python {version}", show=True)
        return "passed", f"Python {version}: {summary_of(tested.splitlines())}"

    def _make_root(self) -> None:
        """Create the root, unless an earlier run has completed it."""
        done = self._folder / "made"
        if done.exists():
            return
        self._say(f"making a bare root of {self.target.suite}")
        shutil.rmtree(self._root, ignore_errors=True)
        scripts = Path("/usr/share/debootstrap/scripts")
        mirror = mirror_of_host()
        command = [
            "debootstrap",
            "--variant=minbase",
            f"--include={PACKAGES}",
            self.target.suite,
            str(self._root),
        ]
        if not (scripts / self.target.suite).exists():
            if not mirror:
                raise Stopped(f"this debootstrap does not know {self.target.suite}; run apt-get update first")
            command += [mirror, str(scripts / FALLBACK_SCRIPT)]
        elif mirror:
            command.append(mirror)
        self._execute(command, INSTALL_S, f"no root of {self.target.suite} could be created")
        done.touch()

    def _copy_settings(self) -> None:
        """Copy the host's settings for package registries into the root, and keep it from starting services."""
        home = Path.home()
        pairs = [(Path(name), self._root / name[1:]) for name in HOST_FILES]
        pairs += [(home / name, self._root / "root" / name) for name in HOME_FILES]
        pairs += [(file, self._root / str(file)[1:]) for file in CERTIFICATES.glob("*.crt")]
        for file, copy in pairs:
            if file.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        settings = "".join(f"{line}\n" for line in output_of("apt-config", "dump") if APT_SETTING.match(line))
        (self._root / "etc/apt/apt.conf.d/99host").write_text(settings, encoding="utf-8")
        refuse = self._root / "usr/sbin/policy-rc.d"
        refuse.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
        refuse.chmod(0o755)
        self._clone.mkdir(exist_ok=True)
        self._inside("update-ca-certificates", 300, "the certificates of the host could not be installed")

    def _clone_head(self) -> None:
        """Put the files of HEAD into the clone; keep only the environment of an earlier run."""
        if not (self._clone / ".git").exists():
            self._git("init", "--quiet", str(self._clone))
        here = ("-C", str(self._clone))
        self._git(*here, "fetch", "--quiet", str(REPOSITORY), "HEAD")
        self._git(*here, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--force", "FETCH_HEAD")
        self._git(*here, "clean", "--quiet", "-ffdx", "--exclude=.venv")

    def _git(self, *arguments: str) -> None:
        self._execute(
            ["git", "-c", "safe.directory=*", *arguments], INSTALL_S, "the repository could not be cloned"
        )

    def _inside(self, command: str, within_s: float, trouble: str, *, show: bool = False) -> str:
        """Run a command in the clone, inside the root, in its own namespaces."""
        mounts, enter, folder = ["mount -t proc proc /proc"], list[str](), str(self._clone)
        if self.target.suite:
            root = shlex.quote(str(self._root))
            mounts = [
                f"mount --bind {root} {root}",  # so that / is a mount inside: network namespaces need that
                f"mount --rbind /dev {root}/dev",
                f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
                f"mount -t proc proc {root}/proc",
                f"mount --rbind /sys {root}/sys",
            ]
            enter, folder = ["chroot", str(self._root)], f"/{self._clone.relative_to(self._root)}"
        # The first shell stays: as the first process of its namespace it reaps orphaned processes.
        first = " && ".join([*mounts, '{ "$@"; exit $?; }'])
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", first, "sh"]
        called = ["sh", "-c", f"cd {shlex.quote(folder)} && {command}"]
        return self._execute([*isolated, *enter, *called], within_s, trouble, show=show)

    def _execute(self, command: list[str], within_s: float, trouble: str, *, show: bool = False) -> str:
        """Run a command, log its output and return it. Raises `Stopped` if it fails."""
        lines: list[str] = []
        dies_with_this = ["setpriv", "--pdeathsig", "KILL", *command]
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                dies_with_this, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
            ) as process,
        ):  # fmt: skip
            end_in_time = threading.Timer(within_s, process.kill)
            end_in_time.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    lines.append(line.rstrip("\n"))
                    if show:
                        print(line, end="", flush=True)
            finally:
                end_in_time.cancel()
                process.kill()
        if process.returncode:
            raise Stopped(
                f"{trouble}: {summary_of(lines)} (exit status {process.returncode}); see {self._log}"
            )
        return "\n".join(lines)

    def _environment(self) -> dict[str, str]:
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if PASSED_ON.fullmatch(name) and (value[:1] != "/" or (self._root / value[1:]).exists())
        }
        path = ROOT_PATH if self.target.suite else os.environ["PATH"]
        home = "/root" if self.target.suite else str(Path.home())
        plain = {"HOME": home, "LANG": "C.UTF-8", "PATH": path, "DEBIAN_FRONTEND": "noninteractive"}
        return plain | passed_on | {"SEMEL_TEST_REQUIRE": "all"}

    def _say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {self.target.name}: {text}", flush=True)


def find_interpreter(version: str) -> str | None:
    """Return an interpreter of the host that runs: named in the environment, on the path, or of pyenv."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [os.environ.get(f"PYTHON{version.replace('.', '')}"), shutil.which(name)]
    candidates += [str(each) for each in sorted(pyenv.glob(f"versions/{version}*/bin/{name}"))]
    for candidate in candidates:
        if candidate and output_of(candidate, "-c", "import ensurepip, venv; print('runs')") == ["runs"]:
            return candidate
    return None


def mirror_of_host() -> str:
    """Return the address of the host's own Debian mirror; empty if it is not known."""
    asked = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Label: Debian")
    return next(iter(output_of(*asked)), "")


def output_of(*command: str) -> list[str]:
    """Return the lines that a command prints; none if it fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return ended.stdout.splitlines()


def summary_of(lines: Sequence[str]) -> str:
    """Return the line in which pytest counts; else the last line that is not empty."""
    told = [line.strip("= ") for line in lines if line.strip("= ")]
    counts = [line for line in told if re.match(r"\d+ (passed|failed|error|skipped|deselected)", line)]
    return next(reversed(counts or told), "it printed nothing")


def table_of(results: Sequence[Result]) -> str:
    """Return the table that is shown at the end."""
    rows = [("target", "Python", "result", "minutes", "details")]
    for each in results:
        took = f"{each.took_s / 60:.1f}"
        rows.append((each.target.name, each.target.python, each.verdict, took, each.details))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def refuse_without_tools() -> None:
    """Exit with an instruction if roots cannot be created."""
    if os.geteuid() != 0:
        sys.exit("make matrix creates Debian roots and mounts, which needs root; run: sudo make matrix")
    missing = sorted({package for program, package in TOOLS.items() if not shutil.which(program)})
    if missing:
        sys.exit(
            f"make matrix needs programs that are not installed; run: apt-get install {' '.join(missing)}"
        )


def main() -> None:
    """Read the options, run the targets one after the other, and show the table."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(description="Run the tests on every Python that semel promises.")
    parser.add_argument(
        "--only", default="", help=f"names of targets, with spaces between: {', '.join(names)}"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("/var/tmp/semel-matrix"), help="folder of the roots"
    )
    parser.add_argument("--jobs", default="3", help="processes that run tests")
    parser.add_argument("--args", default="", help="more arguments for pytest")
    options = parser.parse_args()
    wanted = options.only.split() or names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"no such target: {', '.join(unknown)}; there are: {', '.join(names)}")
    refuse_without_tools()
    results = [
        Run(target, options.cache.resolve(), options.args, options.jobs)()
        for target in TARGETS
        if target.name in wanted
    ]
    print(f"\n{table_of(results)}")
    sys.exit(any(each.verdict == "FAILED" for each in results))


if __name__ == "__main__":
    main()
