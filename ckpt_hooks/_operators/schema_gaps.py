"""Operators with facts missing in their schemas, with a sentence on each list. Names without a library are of ``aten``."""

from __future__ import annotations

from typing import Any

import torch

# Writes. Another uncounted write is in ``_core/modes.py`` (``count_writes``), since rooms below this one need it.

#: Arguments written to although their schemas say inputs: running statistics.
WRITES = dict.fromkeys(
    {
        *("batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
        *("batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"),
    },
    ("running_mean", "running_var"),
)

#: Of these, with ``training`` set, no result depends on what the statistics were: the fourth and fifth argument, and the sixth.
NORMALIZES_BY_BATCH = frozenset({"cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"})

#: Libraries whose operators write to any given tensor, told by neither schemas nor versions: collectives in place, and the
#: gathering and freeing of parameters.
REWRITING = frozenset({"c10d", "fsdp"})

#: Tells the allocator of a stream which uses a tensor's memory. Its schema says a write, but it changes nothing in the tensor.
RECORD_STREAM: Any = torch.ops.aten.record_stream.default

#: Give every written element a new value, whatever the old. Schemas do not say whether the old value matters.
OVERWRITES = frozenset(
    {
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_", "zero_"),
    }
)

#: Write the same again in a second run, so that a rerun may repeat the write. Schemas do not say this.
REPEATABLE = frozenset(
    {
        *("abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "copy_", "embedding_renorm_", "fill_"),
        *("fill_diagonal_", "floor_", "hardtanh_", "index_copy_", "index_fill_", "masked_fill_", "nan_to_num_"),
        *("normal_", "relu_", "renorm_", "round_", "sign_", "threshold_", "tril_", "triu_", "trunc_", "uniform_", "zero_"),
        *("_foreach_abs_", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_", "_foreach_zero_"),
    }
)

#: Give a tensor another storage, or its storage another size. Schemas say a write.
REPLACES_STORAGE = frozenset({"_resize_output_", "resize_", "resize_as_", "resize_as_sparse_", "set_", "set_data"})

# Memory of outputs

#: Promise autograd that their input is not used any more. Outputs share the input's memory, which schemas deny.
ALIASES = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})

#: Return uninitialised memory.
UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

#: Libraries whose operators return new memory, or an argument's.
TRUSTED = frozenset({"aten", "prims", "prim", "quantized"})

# What a result depends on

#: Read the shape of their first argument, and not its content.
LIKE = frozenset(
    {
        *("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randint_like"),
        *("randn_like", "zeros_like"),
    }
)

#: Tell the layout of a tensor of another class, which some tensors cache after the first call; so do all of ``prim``.
LAYOUT = frozenset(
    {
        *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_pinned", "is_strides_like_format"),
        *("numel", "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size"),
        *("sym_storage_offset", "sym_stride"),
    }
)

#: Return more where an argument requires grad, as no argument of a replay does: the results are kept.
LOOKS_AT_GRAD = frozenset({"_sparse_mm_reduce_impl"})

# Random numbers and effects

#: Libraries which tag their random operators; operators of other libraries are watched when they run.
TAGGED = frozenset({"aten", "prims", "_c10d_functional"})

#: Draw the masks of recurrent layers from a buffer of the device and advance it, which schemas do not say; and the operator
#: which makes the buffer, with its seed among the arguments.
BUFFERED_MASKS = frozenset({"_cudnn_init_dropout_state", "_cudnn_rnn", "miopen_rnn"})

#: Operators of operators which only compute an output. Others may write to their arguments.
PURE_HIGHER_ORDER = frozenset({"flex_attention"})
