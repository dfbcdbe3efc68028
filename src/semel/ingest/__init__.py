"""Events that arrive without a broker: webhooks and WebSockets, through one intake."""
