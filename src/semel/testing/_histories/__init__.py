"""The parts of the check of histories: recording, the time of a call, the search for an order, the story."""
