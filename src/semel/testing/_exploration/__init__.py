"""The parts of the exploration: positions of flows, the stage, its moves, the search."""
