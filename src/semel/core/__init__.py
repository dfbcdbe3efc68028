"""The rules of semel: pure, without I/O, clock, thread or event loop."""
