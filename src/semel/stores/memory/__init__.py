"""semel.stores.memory."""
