"""Benchmarks: what semel reaches, as a ratio to the raw limit measured in the same run."""
