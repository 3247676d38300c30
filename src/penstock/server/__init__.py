"""The wire: HTTP, WebSocket and NDJSON streams, documentation, settings, metrics."""
