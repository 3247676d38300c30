"""Forwards the requests that a broker of a cluster does not serve itself to the one that does."""
