"""The addresses of pages about a record or a consumer."""

from urllib.parse import quote, urlencode

from semel.types import Id

__all__ = ["address", "consumer_address", "failures_address"]


def address(record_id: Id, verb: str = "event") -> str:
    """Return the path of the page of a record, or of an action on it."""
    tenant, consumer, key = record_id
    return f"/ui/{verb}/{quote(consumer, safe='')}/{quote(key, safe='')}{_of(tenant)}"


def consumer_address(tenant: str, consumer: str) -> str:
    """Return the path of the page of a consumer."""
    return f"/ui/consumer/{quote(consumer, safe='')}{_of(tenant)}"


def failures_address(**chosen: str) -> str:
    """Return the path of the failures, filtered."""
    return f"/ui/failures?{urlencode({name: value for name, value in chosen.items() if value})}"


def _of(tenant: str) -> str:
    return f"?tenant={quote(tenant, safe='')}" if tenant else ""
