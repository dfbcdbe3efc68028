"""The program, started once and forked for each command, so that many of them take no time.

Each fork is a process of its own with its own arguments, folder, environment and streams, as if started by a shell;
only the imports are shared. What depends on them is tested with a cold start.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from semel.cli import app, settings  # noqa: F401 - imported so that the forks need not
from semel.cli.main import main
from semel.stores.sqlite import SqliteStore  # noqa: F401 - as above


def serve() -> None:
    """Run a command for each line of JSON; answer each with its exit code."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(run(request))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


def run(request: dict[str, Any]) -> int:
    """Become that command; returns its exit code."""
    try:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        for number, (stream, flags) in enumerate(STREAMS):
            opened = os.open(Path(request["streams"]) / stream, flags, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        sys.argv = ["semel", *request["args"]]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as ended:
        sys.stdout.flush()
        return ended.code if isinstance(ended.code, int) else 1
    return code


STREAMS = (
    ("stdin", os.O_RDONLY),
    ("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
)

if __name__ == "__main__":
    serve()
