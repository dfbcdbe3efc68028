"""Bloom filters: a few bits per id. They never decide an answer: an exact store always confirms a "maybe"."""

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
    """Add the ids of a consumer's finished records to the filter; returns how many. Reads every record once.

    For a partition-affine instance, when keys are assigned to it. The store must keep readable keys. No store lists
    its marks, so the filter learns them one by one, when they are seen again.
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
