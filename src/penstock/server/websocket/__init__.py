"""WebSocket connections: the handshake, frames, messages, subscriptions and watches."""
