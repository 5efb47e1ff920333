"""State that a function reaches besides its arguments: noted in forward, put back for a rerun, restored after it."""
