"""Observability: hook events, logs, metrics, traces, history, and the guarantees of a mode on a store."""
