"""`semel import`: take over what another system has recorded as processed."""
