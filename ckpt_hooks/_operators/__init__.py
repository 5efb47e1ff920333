"""Operators: the facts in their schemas, the facts missing there, and their random draws."""
