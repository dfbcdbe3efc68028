"""Kafka: the source, and the runner whose output and offsets commit in one transaction."""
