"""Operators: what their schemas say, what those leave out, and the random numbers that they draw."""
