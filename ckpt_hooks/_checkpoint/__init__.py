"""Regions around code, in all forms but modules of a model: calls, blocks, segments, chunks and loops."""
