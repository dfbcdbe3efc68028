"""What every test shares: Hypothesis profiles and the asyncio backend."""

import signal

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.services", "tests.leftovers", "tests.unclosed"]

# Deadlines are off: a busy computer is no failure. pytest-timeout ends what hangs.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", COMMON, max_examples=25, stateful_step_count=25, derandomize=True)
settings.register_profile("ci", COMMON, max_examples=150, stateful_step_count=50, derandomize=True)
settings.register_profile("soak", COMMON, max_examples=5_000, stateful_step_count=100, print_blob=True)
settings.load_profile("fast")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in everything a shell starts in the background; programs that the tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
