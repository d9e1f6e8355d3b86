"""The parts of the demonstration, shared with the tests that use its model."""
