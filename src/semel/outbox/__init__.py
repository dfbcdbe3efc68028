"""Messages inside the caller's own transaction, and the relay that publishes them."""

from typing import TYPE_CHECKING, Any

from semel.core.relay_flow import Retrying
from semel.outbox.message import Message

__all__ = ["Message", "Relay", "Retrying"]

if TYPE_CHECKING:
    from semel.outbox.relay import Relay
else:

    def __getattr__(name: str) -> Any:
        """Load the relay on first use: publishing alone does not need it."""
        if name == "Relay":
            from semel.outbox.relay import Relay

            return Relay
        raise AttributeError(f"module 'semel.outbox' has no attribute {name!r}")
