"""A differential fuzzer: random programs, run plainly and with regions, compared bit for bit.

``python -m tests.fuzz --programs 5000`` runs it; ``tests/test_fuzz.py`` is the share of it that every test run gets. A seed and
a set of features make a program; a program is a tree of statements that renders as source, so that one that differs is
printed, after shrinking, as a script of its own.
"""
