"""`spillway-lab try`: dense attention beside Spillway, on the user's machine and model."""
