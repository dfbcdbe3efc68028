"""The dashboard: pages about what the service and its store are doing, for people in a browser."""
