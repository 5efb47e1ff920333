"""The forms of a region that are not modules: calls, blocks, segments, chunks and loops."""
