"""Let atheris look for bytes that break a parser: `python -m tests.fuzz.guided "key path" -max_total_time=60`.

It needs `pip install atheris`, which has no wheel for every Python; `make soak` uses it if it is installed.
"""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["semel"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run one target until its time is over; the inputs to begin with are its corpus."""
    _, name, *options = sys.argv
    target, seeds = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, corpus], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
