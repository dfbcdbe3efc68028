"""What every test shares: Hypothesis profiles, the asyncio backend, no skips where all is required."""

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.leftovers", "tests.services"]

# Deadlines are off: a busy computer is no failure. pytest-timeout ends what hangs.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", COMMON, max_examples=25, stateful_step_count=25, derandomize=True)
settings.register_profile("ci", COMMON, max_examples=150, stateful_step_count=50, derandomize=True)
settings.register_profile("soak", COMMON, max_examples=5_000, stateful_step_count=100, print_blob=True)
settings.load_profile("fast")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in everything a shell starts in the background; programs that the tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("SEMEL_TEST_REQUIRE") == "all"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


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
