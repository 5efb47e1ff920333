"""State reached by a function besides its arguments: noted in forward, put back for a rerun, restored after the rerun."""
