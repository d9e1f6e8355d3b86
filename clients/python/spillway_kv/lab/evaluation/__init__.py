"""`spillway-lab eval`: measures errors, rows read and error bounds of sparse attention.

All attends run in a daemon, on queries, keys and values that a model computed for a text.
"""
