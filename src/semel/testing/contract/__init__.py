"""The scenarios of the store contract, a module for each part of the protocol."""
