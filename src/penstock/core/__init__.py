"""The state machines of the broker, without IO, clock, randomness or logging.

Time and ids are arguments. `decide_*` functions read the state and return records or raise an
error; they change nothing. Only `apply` changes state, with a record, both live and in replay.
"""
