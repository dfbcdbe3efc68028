"""The guides from other tools work as printed: every Python block runs, on the real servers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import redis

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)

PRINTED = {
    "SET NX": [
        "charged order-1 None",
        "Done(value=None, replayed=True, kept=False)",
        "Done(value='charged order-2')",
    ],
    "idemkit": ["charging order-3", "receipt of order-3", "receipt of order-3"],
    "AWS Lambda Powertools": ["charging order-4", "receipt of order-4", "receipt of order-4"],
    "celery-once": [
        "already queued",
        "writing the report of 2026-11-15",
        "report-2026-11-15.pdf",
        "report-2026-11-15.pdf",
        "report-2026-11-15.pdf",
        "celery-once alone:",
        "writing the report of 2026-11-15",
        "report-2026-11-15.pdf",
        "writing the report of 2026-11-15",
        "report-2026-11-15.pdf",
    ],
}

AFTERWARDS = {
    "celery-once": """
import queue

from celery.contrib.testing.worker import start_worker
from celery.signals import task_postrun
from celery_once import AlreadyQueued

day = "2026-11-15"
first = report.delay(day=day)
try:
    report.delay(day)
except AlreadyQueued:
    print("already queued")

freed = queue.SimpleQueue()


@task_postrun.connect
def free(**_):
    freed.put(None)


def result(queued):
    "Wait for the end of the task too: celery-once frees its lock after the result is there."
    value = queued.get(timeout=60)
    freed.get(timeout=60)
    return value


with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=60):
    print(result(first))
    print(result(report.delay(day=day)))
    print(result(report.delay(day)))
    print("celery-once alone:")
    print(result(report_before.delay(day=day)))
    print(result(report_before.delay(day=day)))
once.close()
"""
}
"""What a reader does with a guide's code: a real worker, and tasks that are queued twice."""


@pytest.mark.parametrize("tool", PRINTED)
def test_a_guide_does_what_it_says(tool: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/come-from.md").read_text(encoding="utf-8")
    part = page.partition(f"## From {tool}\n")[2].partition("\n## ")[0]
    url = redis.place(tmp_path).partition("?")[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = ""
    for kind, block in _BLOCK.findall(part):
        text = block.replace("redis://localhost/0", url)
        if kind == "python":
            program += text
        else:  # after what the program has done so far
            command = text.removeprefix("$ ").strip()
            program += (
                f"\nimport subprocess\nsubprocess.run({command!r}, shell=True, check=True, stdout=-3)\n"
            )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program + AFTERWARDS.get(tool, "")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == PRINTED[tool]


def test_the_table_of_an_inbox_works_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/existing-data.md").read_text(encoding="utf-8")
    (block,) = (text for kind, text in _BLOCK.findall(page) if kind == "python")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("False True\n", "")
