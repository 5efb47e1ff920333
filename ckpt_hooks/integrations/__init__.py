"""The library under other packages' names: regions for code that calls ``torch.utils.checkpoint``, and for models of others.

Nothing here imports the other package before a call of its function.
"""

from .patch_torch import patch_torch
from .transformers import enable_in_transformers

__all__ = ["enable_in_transformers", "patch_torch"]
