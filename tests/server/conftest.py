"""A service on SQLite for the tests of one module that do not change how it is set up."""

from collections.abc import Iterator

import pytest

from semel.server.settings import ServeSettings
from tests.server.tools import Running, serving


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """On loopback, without tokens."""
    folder = tmp_path_factory.mktemp("service")
    with serving(ServeSettings(store=f"sqlite:///{folder}/semel.db?synchronous=normal", port=0)) as running:
        yield running
