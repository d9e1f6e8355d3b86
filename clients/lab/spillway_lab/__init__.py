"""Research tools around Spillway, behind the program `spillway-lab`.

`evaluation` compares methods of sparse attention, `training` trains hash functions, `bench`
measures hardware, `serving` runs a daemon for as long as a program needs it.
"""
