"""Function frames: a region which is a call of a function, brought back by another call of the function."""
