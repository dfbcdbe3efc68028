"""The service behind `semel serve`: any store over HTTP and WebSocket, for every language."""
