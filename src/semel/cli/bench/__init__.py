"""How fast a store is, beside the raw limit of what it stands on: for `semel bench` and for `benchmarks/`."""
