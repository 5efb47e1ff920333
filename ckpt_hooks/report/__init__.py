"""Reports on what regions do."""
