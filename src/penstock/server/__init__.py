"""The wire: HTTP on the fast lane, NDJSON streams, admin pages, settings, metrics."""
