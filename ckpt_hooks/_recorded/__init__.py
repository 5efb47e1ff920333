"""Recorded frames: a region that is a block of code, brought back by replaying the operators that ran in it."""
