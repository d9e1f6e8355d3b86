"""Fault injection. Results are compared with a model in Python that knows what must be there."""
