"""A pytest plugin, `pytest -p tests.measure_coverage`: the branch coverage of the tests that need no server.

Tracing makes Python code half as slow again, so slow tests and those that need a server are not measured. It is not
loaded by default, and it is loaded before anything imports semel, so that the lines of an import count.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

FOLDER = "SEMEL_TEST_COVERAGE"
"""The environment variable with the folder in which the workers of a run leave their data."""
FLOORS = {"core": 95.0, "client": 95.0, "stores": 88.0, "brokers": 60.0}
"""The least branch coverage of each package, in per cent. A run below it fails."""
UNMEASURED = ("slow", "service")
UNMEASURED_PATHS = (
    "cli",
    "server",
    "simulation",
    "test_model.py",
    "test_machine_mutants.py",
    "test_mutants.py",
)
"""Folders and files whose tests are about other packages, or run the same lines thousands of times."""
SOURCES = Path(__file__).resolve().parents[1] / "src" / "semel"

_is_first = FOLDER not in os.environ
if _is_first:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="semel-coverage-")
_folder = Path(os.environ[FOLDER])
_coverage = coverage.Coverage(data_file=str(_folder / "data"), data_suffix=True)
# A process that only hands out tests measures nothing; combined data need not come from every worker.
_coverage.set_option("run:disable_warnings", ["module-not-imported", "no-data-collected"])
_coverage.start()


def pytest_collection_finish() -> None:
    _coverage.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marked = any(item.get_closest_marker(name) for name in UNMEASURED)
    if marked or not {item.path.parent.name, item.path.name}.isdisjoint(UNMEASURED_PATHS):
        return (yield)
    _coverage.start()
    try:
        return (yield)
    finally:
        _coverage.stop()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    _coverage.stop()
    _coverage.save()
    yield  # the workers end
    if not _is_first:
        return
    if session.exitstatus == pytest.ExitCode.INTERRUPTED:  # workers were cut off: their data may be missing
        shutil.rmtree(_folder)
        return
    found = _measured()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        shown = ", ".join(f"{package} {per_cent:.1f} %" for package, per_cent in found.items())
        reporter.write_line("")
        reporter.write_line(f"branch coverage by the tests that need no server: {shown}")
    for package, floor in FLOORS.items():
        if found[package] < floor:
            if reporter is not None:
                reporter.write_line(f"the branch coverage of {package} is below {floor:g} %", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _measured() -> dict[str, float]:
    """Return the branch coverage of each package in per cent, from the data of all workers."""
    total = coverage.Coverage(data_file=str(_folder / "data"))
    total.combine()
    written = _folder / "total.json"
    total.json_report(include=[f"{SOURCES / package}/*" for package in FLOORS], outfile=str(written))
    files = json.loads(written.read_bytes())["files"]
    shutil.rmtree(_folder)
    found = {}
    for package in FLOORS:
        sums = [each["summary"] for name, each in files.items() if f"semel/{package}/" in name]
        had = sum(each["covered_lines"] + each["covered_branches"] for each in sums)
        found[package] = 100 * had / sum(each["num_statements"] + each["num_branches"] for each in sums)
    return found
