"""semel.runtime."""
