"""semel.client."""
