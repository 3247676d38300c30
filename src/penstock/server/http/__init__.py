"""HTTP/1.1: connections, the head cache, the order of responses, admission and dispatch."""
