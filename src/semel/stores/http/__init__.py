"""Records behind `semel serve`: any store, reached over HTTP by any number of machines."""

from typing import TYPE_CHECKING

from semel.errors import StoreUnknown
from semel.runtime.extras import install_command

if TYPE_CHECKING:
    from semel.stores.http.store import HttpStore

__all__ = ["from_url"]


def from_url(url: str) -> "HttpStore":
    """The store that the URL names; nothing is opened. Raises `PolicyInvalid` for options it does not know."""
    try:
        from semel.stores.http.store import (
            HttpStore,  # not above: the server reads `wire` without this driver
        )
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise StoreUnknown(
            f"http: and https: need their driver; install the extra: {install_command('http-client')}"
        ) from error
    return HttpStore(url)
