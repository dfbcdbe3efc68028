"""Look at what semel does and say it: what a mode and a store guarantee."""
