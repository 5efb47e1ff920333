"""Regions in other packages' code: programs that call ``torch.utils.checkpoint``, and models of Transformers.

No module here imports the other package before its function is called.
"""

from .patch_torch import patch_torch
from .transformers import enable_in_transformers

__all__ = ["enable_in_transformers", "patch_torch"]
