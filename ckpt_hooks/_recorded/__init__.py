"""Recorded frames: regions which are a block of code, brought back by a replay of the block's operators."""
