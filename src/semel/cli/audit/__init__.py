"""`semel audit`: the duplicates in stored events."""
