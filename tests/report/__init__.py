"""Reports: debug mode, traces, saved tensors."""
