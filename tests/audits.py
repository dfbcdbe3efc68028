"""What stands in the audit of a store."""

from semel.core.commands import Scan
from semel.core.protocols import Store
from semel.runtime import audit
from semel.stores.registry import store_for


def audit_entries(url: str) -> list[audit.AuditEntry]:
    """The entries, oldest first."""
    store = store_for(url)
    assert isinstance(store, Store)
    store.open()
    try:
        (page,) = store.send((Scan(audit.TENANT, audit.CONSUMER, limit=1000),))
    finally:
        store.close()
    return sorted(map(audit.entry_of, page.records), key=lambda entry: entry.at_us)
