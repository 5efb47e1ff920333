"""``checkpoint`` and ``checkpoint_sequential``, called as in ``torch.utils.checkpoint``."""
