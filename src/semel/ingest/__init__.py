"""semel.ingest."""
