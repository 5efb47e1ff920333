"""Torch's walks over nested containers, which have no public name."""

from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_leaves, tree_map, tree_map_only

__all__ = ["keystr", "tree_flatten_with_path", "tree_iter", "tree_leaves", "tree_map", "tree_map_only"]
