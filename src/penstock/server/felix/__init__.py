"""Streams, caches and their registry on the wire: messages, REST routes, feeds and WebSockets."""
