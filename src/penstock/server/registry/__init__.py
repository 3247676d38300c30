"""Entries of the registry on the wire, and following a control plane."""
