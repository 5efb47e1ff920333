"""What both kinds of frame share: frames, scopes of backward, the stack of open regions, settings, events."""
