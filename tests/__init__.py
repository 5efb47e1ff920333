"""Tests, by module and by promise."""
