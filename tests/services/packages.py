"""Programs that tests need: on the path, or installed by the package manager without starting any service."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def found_or_installed(find: Callable[[], T | None], package: str) -> T | None:
    """What `find` finds; if nothing, it is asked again after the package was installed, where that may be done."""
    found = find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with locked("semel-apt"):
            found = find()
            if found is None:
                quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
                for command in (
                    ["apt-get", "update", "-qq"],
                    ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
                ):
                    subprocess.run(command, env=quiet, capture_output=True, check=False, timeout=600)
                found = find()
    return found


def beside_python(name: str) -> str | None:
    """A program on the path, or one that a wheel put beside the interpreter."""
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if beside.exists() else None)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time on this computer."""
    with (Path(tempfile.gettempdir()) / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
