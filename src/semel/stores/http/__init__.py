"""The store behind `semel serve`: any store, used over HTTP by any number of machines."""

from typing import TYPE_CHECKING

from semel.errors import StoreUnknown
from semel.runtime.extras import install_command

if TYPE_CHECKING:
    from semel.stores.http.store import HttpStore

__all__ = ["from_url"]


def from_url(url: str) -> "HttpStore":
    """Return the store for the URL; opens no connection. Raises `PolicyInvalid` for unknown options."""
    try:
        from semel.stores.http.store import (
            HttpStore,  # imported here: the server uses `encoding` without this driver
        )
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise StoreUnknown(
            f"http: and https: need their driver; install the extra: {install_command('http-client')}"
        ) from error
    return HttpStore(url)
