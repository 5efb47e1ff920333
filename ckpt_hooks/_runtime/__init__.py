"""The runtime that both kinds of frame stand on.

Imports run one way: ``passes`` (what a backward brought back) <- ``groups`` <- ``frame`` (frames and handles) <-
``settings`` <- ``stack`` and ``observers`` <- ``hooks`` (pack and unpack).
"""
