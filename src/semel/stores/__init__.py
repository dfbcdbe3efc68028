"""Where records live: one module or package per store, picked by URL in `registry`."""
