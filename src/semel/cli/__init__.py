"""The command line: `semel` and `python -m semel`. Needs the extra `cli`."""
