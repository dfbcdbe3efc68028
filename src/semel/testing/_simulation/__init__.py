"""The parts of the simulation: a world, a store, workers, sources, sinks and a referee who sees it all."""
