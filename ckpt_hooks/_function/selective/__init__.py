"""Selective policies in function frames: the operators of forward in order, and the outputs kept of them."""
