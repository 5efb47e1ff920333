"""Tensors held until backward: as they are, by saved-tensor hooks, or on the host; their copies and fingerprints."""
