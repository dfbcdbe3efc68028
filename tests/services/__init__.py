"""Real servers for tests: started at first use, shared by the workers of a run, stopped after its last test.

As a pytest plugin it stops them, and lists at the end of the run what could not be had and why.
"""

import pytest

from tests.services import server


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
    server.clear()
