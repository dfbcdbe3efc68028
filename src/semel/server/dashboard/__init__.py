"""The dashboard: pages about the service and its store, for people in a browser."""
