"""Benchmarks: the speed of semel as a ratio to the raw limit measured in the same run."""
