"""Real servers for tests: started at first use, shared by the workers of a run, stopped after its last test.

As a pytest plugin it installs the programs that are absent, marks the tests that need a server, stops the servers,
and reports at the end what was installed, used and skipped. With `SEMEL_TEST_REQUIRE=all` a skip is a failure.
"""

import os
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.services import kafka, packages, programs, server

REQUIRE_ALL = os.environ.get("SEMEL_TEST_REQUIRE") == "all"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--install",
        action="store_true",
        help="before the first test, install the programs that tests use (Debian packages: as root)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if "not service" in config.getoption("markexpr"):
        server.refuse("this test needs a server: mark it with @pytest.mark.service")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("install"):
        return
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    absent = programs.absent()
    wanted = [each for each in absent if packages.may_install() or not each.package]
    if wanted:
        reporter.write_line(f"installing what tests use: {', '.join(each.name for each in wanted)}")
        reporter.flush()  # it lasts
        programs.install(wanted)
        absent = programs.absent()
    for each in absent:
        reporter.write_line(f"{each.name} is not here: {each.advice}", yellow=True)
    if absent and REQUIRE_ALL:
        way = "" if packages.may_install() else "; as root on Debian this is done for you"
        pytest.exit(f"SEMEL_TEST_REQUIRE=all requires the programs above{way}", returncode=1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of parameters that need a server: those have a true attribute `needs_service`."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec and any(getattr(value, "needs_service", False) for value in callspec.params.values()):
        item.add_marker("service")


def pytest_sessionfinish(session: pytest.Session) -> None:
    server.leave()
    if not hasattr(session.config, "workerinput") and (left := server.stop_all()):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            reporter.write_line(f"servers that their tests did not stop: {left}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the others go on
    for name, reason in server.missing().items():
        terminalreporter.write_line(f"service {name} cannot be had: {reason}", yellow=True)
    used = [f"{name} {version}" for name, version in programs.used().items()]
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if used or config.getoption("install"):
        terminalreporter.section("programs and skips")
        terminalreporter.write_line(f"installed: {', '.join(programs.installed()) or 'nothing'}")
        terminalreporter.write_line(f"used: {', '.join(used) or 'nothing'}")
        terminalreporter.write_line(f"skipped: {skipped.total() or 'nothing'}")
        for reason, count in sorted(skipped.items()):
            terminalreporter.write_line(f"  {count}: {reason}")
    server.clear()


@pytest.fixture(params=kafka.RELEASES)
def every_kafka(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test on each release of Kafka. Name it with `usefixtures`: it then comes before the test's own."""
    with kafka.release(request.param):
        yield


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but SEMEL_TEST_REQUIRE=all requires every test: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report
