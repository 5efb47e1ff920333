"""Reports on regions."""
