"""Services for the tests of one module that do not change how they are set up."""

from collections.abc import Iterator

import pytest

from semel.server.settings import ServeSettings
from tests.server.stores import KINDS, store_url
from tests.server.tools import Running, serving


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """On SQLite and loopback, without tokens."""
    folder = tmp_path_factory.mktemp("service")
    with serving(
        ServeSettings(auth="none", store=f"sqlite:///{folder}/semel.db?synchronous=normal", port=0)
    ) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def anywhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The same on each kind of store."""
    store = store_url(request.param, tmp_path_factory.mktemp("service"))
    with serving(ServeSettings(auth="none", store=store, port=0)) as running:
        yield running
