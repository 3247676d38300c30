"""The vocabulary that all layers share: names, limits, errors, envelopes, messages, records.

Must not contain behaviour or IO.
"""
