"""What both kinds of frame share: frames, handles, scopes of backward, the stack of open regions, settings.

A frame is one region. It knows its name, its parent and what it brought back for which backward. How it brings tensors back is
its kind's own: :mod:`ckpt_hooks._function` calls a function again, :mod:`ckpt_hooks._recorded` replays operators.
"""
