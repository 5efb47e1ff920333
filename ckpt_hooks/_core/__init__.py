"""The base of both kinds of frame: frames, handles, scopes of backward, the stack of open regions, settings, events.

A frame is one region, with a name, a parent, and the values brought back for each backward. The kinds differ in how they bring
tensors back: :mod:`ckpt_hooks._function` calls a function again, :mod:`ckpt_hooks._recorded` replays operators.
"""
