"""`kcat`, a Kafka client of others."""

import subprocess

from tests.services.programs import program


def kcat(*arguments: str, given: str = "") -> str:
    """Run it to its end; what it read."""
    ended = subprocess.run(
        [program("kcat"), "-q", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
