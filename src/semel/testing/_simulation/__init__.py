"""The parts of the simulation: a world, a store, workers, sources, sinks and a referee that checks every answer."""
