"""Operators of which schemas leave something out, with a sentence on each list. Names without a library are of ``aten``.

One more way to write without a word is in :mod:`ckpt_hooks._core.modes`, since rooms below this one need it: in-place operators
over lists of tensors (``_foreach_mul_``) count versions only where no dispatch mode is active (``count_writes``).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "ALIASES",
    "BLANK",
    "BUFFERED_MASKS",
    "LAYOUT",
    "LIKE",
    "LOOKS_AT_ALL_SWITCHES",
    "LOOKS_AT_GRAD",
    "LOOKS_AT_SWITCHES",
    "OVERWRITES",
    "PURE_HIGHER_ORDER",
    "QUIET_FUNCTIONS",
    "RECORD_STREAM",
    "REPEATABLE",
    "REPLACES_STORAGE",
    "REWRITING",
    "TAGGED",
    "TRUSTED",
    "WRITES",
]

# Writes

#: Arguments that operators write to though schemas have them as inputs: running statistics.
WRITES = dict.fromkeys(
    {
        *("batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
        *("batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"),
    },
    ("running_mean", "running_var"),
)

#: Libraries whose operators write to any tensor that they are given, and neither schemas nor versions tell: collectives that
#: work in place, and the gathering and freeing of parameters.
REWRITING = frozenset({"c10d", "fsdp"})

#: Names by which Python calls operators and collectives of those two kinds, and others that write to buffers quietly.
QUIET_FUNCTIONS = frozenset(
    {
        *("all_gather_into_tensor", "all_reduce", "batch_norm", "broadcast"),
        *("fused_moving_avg_obs_fake_quant", "instance_norm", "native_batch_norm"),
    }
)

#: Tells the allocator that a stream uses a tensor's memory. Its schema has it write to the tensor, in which it changes nothing.
RECORD_STREAM: Any = torch.ops.aten.record_stream.default

#: Give every element of what they write to a new value, whatever it was. Schemas do not say whether the old one matters.
OVERWRITES = frozenset(
    {
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_", "zero_"),
    }
)

#: Write the same again where they have written before, so that a rerun may repeat them, which schemas do not say.
REPEATABLE = frozenset(
    {
        *("abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "copy_", "embedding_renorm_", "fill_"),
        *("fill_diagonal_", "floor_", "hardtanh_", "index_copy_", "index_fill_", "masked_fill_", "nan_to_num_"),
        *("normal_", "relu_", "renorm_", "round_", "sign_", "threshold_", "tril_", "triu_", "trunc_", "uniform_", "zero_"),
        *("_foreach_abs_", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_", "_foreach_zero_"),
    }
)

#: Give a tensor another storage, or its storage another size, which schemas have as a write.
REPLACES_STORAGE = frozenset({"_resize_output_", "resize_", "resize_as_", "resize_as_sparse_", "set_", "set_data"})

# Memory of outputs

#: Promise autograd that nobody looks at their input any more. Outputs share its memory, which schemas deny.
ALIASES = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})

#: Return memory that nobody has written to yet.
BLANK = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

#: Libraries whose operators return new memory, or an argument's.
TRUSTED = frozenset({"aten", "prims", "prim", "quantized"})

# What a result depends on

#: Look at what shape their first argument has, and not at what is in it.
LIKE = frozenset(
    {
        *("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randint_like"),
        *("randn_like", "zeros_like"),
    }
)

#: Tell how a tensor of another class is laid out, which some keep once they were asked; so do all of ``prim``.
LAYOUT = frozenset(
    {
        *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_pinned", "is_strides_like_format"),
        *("numel", "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size"),
        *("sym_storage_offset", "sym_stride"),
    }
)

#: Choose among kernels by switches of the process that only a full look at them tells of.
LOOKS_AT_SWITCHES = ("attention", "conv", "dot", "gelu", "gru", "linalg", "linear", "lstm", "mm", "mv", "rnn")

#: Of those, the ones for which there are switches besides those that matter to all of them.
LOOKS_AT_ALL_SWITCHES = ("conv", "gru", "lstm", "rnn")

#: Return more where an argument requires grad, which no argument of a replay does: what they returned is kept.
LOOKS_AT_GRAD = frozenset({"_sparse_mm_reduce_impl"})

# Random numbers and effects

#: Libraries whose operators are tagged where they draw random numbers; those of others are looked at when they run.
TAGGED = frozenset({"aten", "prims", "_c10d_functional"})

#: Draw the masks of recurrent layers from a buffer of the device, which they advance though their schemas do not say so; and
#: the one that makes that buffer, whose seed is a number among its arguments.
BUFFERED_MASKS = frozenset({"_cudnn_init_dropout_state", "_cudnn_rnn", "miopen_rnn"})

#: Operators of operators that compute an output of their own and do nothing else. Others may write to their arguments.
PURE_HIGHER_ORDER = frozenset({"flex_attention"})
