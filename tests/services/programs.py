"""Programs of others that tests run: from the path or the package manager."""

import shutil
from pathlib import Path

from tests.services import server
from tests.services.packages import found_or_installed
from tests.services.server import Missing, State


def program(name: str, package: str) -> str:
    """Where it is. Skips the test where it cannot be had, which `SEMEL_TEST_REQUIRE=all` makes a failure."""

    def find(_folder: Path) -> State:
        found = found_or_installed(lambda: shutil.which(name), package)
        if found is None:
            raise Missing(f"install {name} (Debian: {package})")
        return {"program": found}

    found: str = server.shared(name, find)["program"]
    return found
