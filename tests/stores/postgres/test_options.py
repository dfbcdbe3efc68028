"""What a PostgreSQL store is told beside its URL."""

from typing import Any

import pytest

from semel.errors import PolicyInvalid
from semel.stores.postgres import AsyncPostgresStore, PostgresStore


@pytest.mark.parametrize("store", [PostgresStore, AsyncPostgresStore])
def test_an_option_of_semels_in_the_drivers_url_is_named(store: Any) -> None:
    with pytest.raises(PolicyInvalid, match=r"PostgresStore\(url, schema='a'\)"):
        store("postgresql://localhost/app?schema=a")
    with pytest.raises(PolicyInvalid, match="this is not a PostgreSQL URL"):
        store("postgresql://localhost/app?nonsense=a")
