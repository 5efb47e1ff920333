"""The library under other packages' names: regions for code that calls ``torch.utils.checkpoint``, and for models of others.

Nothing here imports the other package before a call of its function.
"""

from .patch_torch import patch_torch

__all__ = ["patch_torch"]
