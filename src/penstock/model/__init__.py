"""The vocabulary every layer shares: names, limits, errors, envelope, message, records.

No behaviour, no IO.
"""
