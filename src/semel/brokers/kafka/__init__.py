"""semel.brokers.kafka."""
