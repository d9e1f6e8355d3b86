"""Research tools around Spillway, behind the program `spillway-lab`.

`evaluation` compares methods of sparse attention, `training` trains hash functions, `bench`
measures hardware, and `serving` runs a daemon as long as a program needs it.
"""
