"""Byte budgets."""
