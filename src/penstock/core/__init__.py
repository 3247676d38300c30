"""Pure state machines of the broker: no IO, no clock, no randomness, no logging.

Time and ids are arguments. `decide_*` functions look at state and return records or raise an
error; they change nothing. `apply` is the only way a record changes state, live and in replay.
"""
