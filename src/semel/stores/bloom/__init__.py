"""Bloom filters: a few bits per id, and never an answer of their own. "Maybe" is always confirmed by an exact store."""

from semel.core.commands import Page, Scan
from semel.core.ids import digest
from semel.core.protocols import Store
from semel.errors import StoreUnavailable, StoreUnknown
from semel.runtime.extras import install_command
from semel.stores.tiered.protocols import Filter, Fullness

try:
    from semel.stores.bloom.filter import Bloom
except ModuleNotFoundError as _missing:
    if _missing.name != "rbloom":
        raise
    raise StoreUnknown(
        f"a Bloom filter needs rbloom; install the extra: {install_command('bloom')}"
    ) from _missing

__all__ = ["Bloom", "Filter", "Fullness", "rebuild"]

PAGE_MAX = 500


def rebuild(filter: Filter, store: Store, *, consumer: str, tenant: str = "") -> int:  # noqa: A002 - as users write it
    """Put the ids of a consumer's finished records into the filter; how many there were. Reads every record once.

    What a partition-affine instance does when keys are assigned to it. The store must keep readable keys; marks are
    not listed by any store, so they come back one by one, as they are seen.
    """
    cursor: str | None = None
    count = 0
    while True:
        scan = Scan(tenant, consumer, "done", cursor=cursor, limit=PAGE_MAX)
        page = store.send((scan,))[0]
        if not isinstance(page, Page):
            raise StoreUnavailable(f"{store.name} gave no answer") from page.error
        filter.add_many([digest(record.id) for record in page.records])
        count += len(page.records)
        if page.cursor is None:
            return count
        cursor = page.cursor
