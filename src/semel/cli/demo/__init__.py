"""`semel demo`: a queue that repeats messages, workers that are killed, and a count of effects."""
