"""`spillway-lab eval`: how good, how sparse and how honest methods of sparse attention are.

Everything attends in a daemon, on what a model's attention saw of a text.
"""
