"""What a model takes with Spillway, and what fits: `spillway-lab size`."""
