"""What Python holds beside tensor arguments: noted in forward, lent to a rerun, put back after it."""
