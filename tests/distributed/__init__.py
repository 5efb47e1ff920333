"""Regions in programs of two processes, each bit for bit as without regions."""
