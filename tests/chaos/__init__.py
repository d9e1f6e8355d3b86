"""Faults on purpose, each compared with what a model in Python says must be there."""
