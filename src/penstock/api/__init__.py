"""The interface of an engine: commands, outcomes, sinks, handles, reports, metrics, `Engine`.

The server is written against this package and `model` alone, so another engine can take the place
of the embedded one. Only data, protocols and pure functions: no state, no IO, no clock.
"""
