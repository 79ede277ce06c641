"""The operators of the graph IR: a closed table that importers target and emitters implement.

Every operator is one of eleven kinds. ``POINTWISE`` reads its operands at the output's own index;
``VIEW`` reads one operand at a permuted or affine index; ``INJECTIVE`` reads at computed indices;
``REDUCE``, ``WINDOW`` and ``CONTRACT`` sum or select over axes that the output lacks; ``UPDATE``
replaces a part of one operand; ``RECURRENCE`` goes along an axis, each step from the one before;
``GROUPED`` multiplies rows that lie in groups, each group by a matrix of its own;
``LEAF`` has no operand; ``PREPARED`` is never part of a kernel: it is computed ahead, of
parameters.
"""

from __future__ import annotations

from enum import StrEnum


class OpKind(StrEnum):
    """How an operator's output element depends on its operands' elements."""

    LEAF = "leaf"
    POINTWISE = "pointwise"
    VIEW = "view"
    INJECTIVE = "injective"
    REDUCE = "reduce"
    WINDOW = "window"
    CONTRACT = "contract"
    PREPARED = "prepared"
    UPDATE = "update"
    RECURRENCE = "recurrence"
    GROUPED = "grouped"


# Leaves.  input: attrs index, static (bool: a parameter or buffer that rarely changes) and perhaps
#          coded (True: twelve bits are enough for what it holds, see ``graph.coded``) or
#          counts (True: see ``Node.is_count``)
#          const: attr value (number, or a string: "nan", "inf", "-inf", "-0.0"); shape is always ()
#          iota:  attr dim; element = index along that dim (integer dtype)
LEAVES = ("input", "const", "iota")

UNARY = (
    "neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt",
    "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "erf", "erfc", "sigmoid", "relu", "floor", "ceil", "trunc",
    "round",  # half to even
    "isnan", "isinf", "logical_not", "bitwise_not",
    "cast",  # to the node's dtype; float -> int truncates, any -> bool is != 0
)  # fmt: skip

BINARY = (
    "add", "sub", "mul",
    "div",  # floating only
    # Python semantics (sign of the divisor); integer division by zero must not trap
    "floordiv", "mod",
    "truncdiv", "fmod",  # C semantics (sign of the dividend)
    "pow", "atan2", "maximum", "minimum",  # maximum/minimum propagate NaN
    "eq", "ne", "lt", "le", "gt", "ge",  # -> bool
    "logical_and", "logical_or", "logical_xor",  # bool operands
    "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right",
)  # fmt: skip

TERNARY = ("where",)  # (bool condition, a, b)

# within: (x, count), attrs stride, extent and perhaps more: x, of which the elements at row-major
#   positions p count where (p // stride) % extent < count + more, count being an integer of shape
#   (); the others may be anything (see ``graph.extents``)
PARTIAL = ("within",)

# Views.  reshape: same number of elements, row-major
#         permute: attr perm (output dim i is input dim perm[i])
#         broadcast: numpy rules, operand rank <= output rank
#         slice: attrs starts, steps (one per dim; output shape gives the stops) | flip: attr dims
VIEWS = ("reshape", "permute", "broadcast", "slice", "flip")

# Injective.  pad: attrs lo, hi (per dim, >= 0), value | cat: attr dim, n operands
#   take: (x, index), attr dim: out[a.., i.., b..] = x[a.., index[i..], b..]; a negative index
#     counts from the end
#   gather: (x, index), attr dim: torch.gather, index rank = x rank
INJECTIVE = ("pad", "cat", "take", "gather")

# Reduce.  sum, prod, max, min, any, all: attr axes (sorted tuple); reduced dims are dropped;
#     max/min propagate NaN
#   argmax, argmin: attr axes (one axis), first occurrence, int64; NaN counts as the largest
#     (argmax) or the smallest (argmin)
REDUCE = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")

# Window.  window_max, window_sum over the trailing len(kernel) dims: attrs kernel, stride, lo, hi,
#     dilation.
#   Padding contributes -inf (lowest for integers) or 0. Output shape is given by the node
#     (ceil_mode is the importer's).
#   window_argmax: where window_max's element lies, int32 or int64, row-major among those dims of
#     the operand: the first of equals, but the last NaN, and the first element of the window that
#     is no padding where nothing exceeds what padding contributes
WINDOW = ("window_max", "window_sum", "window_argmax")

# Contract.  matmul: (..., M, K) x (..., K, N), equal leading dims; the second operand may be int8
#     where the first is a float
#   conv: (N, C, *S) x (O, C/groups, *R): attrs stride, lo, hi (padding), dilation, groups
#   conv_transpose: (N, C, *S) x (C, O/groups, *R): attrs stride, lo (padding), dilation, groups;
#     output shape is given
#   matmul_grouped: (M, K) x words (ceil(K bits / 32), N) int32, scales (ceil(K / group), N) and
#     perhaps offsets like them: attrs bits, group (whole words). The second operand is what
#     ``group_floats`` makes of them
#   Accumulation is float32 for float32/float16/bfloat16, float64 for float64, the same integer type
#     for integers.
CONTRACT = ("matmul", "conv", "conv_transpose", "matmul_grouped")

# Prepared: weights of four or eight bits (see ``graph.nibbles``).
#   group_scales: (K, N) -> (ceil(K / group), N): attr group
#   group_words: (K, N), scales -> (ceil(K / 8), N) int32, of four bits: attr group
#   byte_words: (K, N) int8 -> (ceil(K / 4), N) int32
#   torch_words: (N, K / 2) uint8 -> (K / 8, N) int32: attr block (``nibbles.from_torch``)
#   plane: (..., n) -> (...): attr at, of the last axis
#   group_floats: words, scales and perhaps offsets -> (K, N): attrs bits, group
PREPARED = ("group_scales", "group_words", "byte_words", "torch_words", "plane", "group_floats")

# Update.  update: (x, rows, index, ...), attrs dim, in_place: x with rows at the positions that the
#   indices (of one shape) name along its axes dim, dim + 1, ...:
#   out[a.., index[i..], more[i..], b..] = rows[a.., i.., b..]; a negative index counts from the
#   end, and of several rows for one place the last counts. in_place: x is an input that nothing
#   else reads, and its memory becomes the result's.
# accumulate: the same operands, attr dim: rows are added to x, in their order.
UPDATE = ("update", "accumulate")

# Recurrence: what a recurrent layer does step by step, after its input was multiplied. Operands
#   are what inputs give each gate, (steps T, N, directions D, gates, H), biases included; weights
#   (D, H, gates H); the state before the first step, (D, N, H); and another one. The result is the
#   state after each step, (T, N, D, H). Attr reverse: for each direction 1 if it begins at the end.
#   lstm: gates i, f, g, o; the fourth operand are the cells before the first step, and attr cells
#     (0 or 1) says how many entries behind the last step have those after it
#   gru: gates r, z, n; the fourth operand (D, H) is what r multiplies with the state's share of n
#   rnn_tanh, rnn_relu: one gate, three operands
RECURRENCE = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Grouped.  grouped_mm: (S, K) x (E, K, N), ends (E,) integers that do not fall: rows from the end
#   of the group before on, up to ends[e], are multiplied by matrix e; rows behind the last end are
#   zeros. Ends outside of 0 to S count as the nearest of these. Accumulation as in matmul.
GROUPED = ("grouped_mm",)

KINDS: dict[str, OpKind] = {
    **dict.fromkeys(LEAVES, OpKind.LEAF),
    **dict.fromkeys((*UNARY, *BINARY, *TERNARY, *PARTIAL), OpKind.POINTWISE),
    **dict.fromkeys(VIEWS, OpKind.VIEW),
    **dict.fromkeys(INJECTIVE, OpKind.INJECTIVE),
    **dict.fromkeys(REDUCE, OpKind.REDUCE),
    **dict.fromkeys(WINDOW, OpKind.WINDOW),
    **dict.fromkeys(CONTRACT, OpKind.CONTRACT),
    **dict.fromkeys(PREPARED, OpKind.PREPARED),
    **dict.fromkeys(UPDATE, OpKind.UPDATE),
    **dict.fromkeys(RECURRENCE, OpKind.RECURRENCE),
    **dict.fromkeys(GROUPED, OpKind.GROUPED),
}

# Pointwise operators that cost more than a few instructions: not worth computing twice.
EXPENSIVE = frozenset(
    (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid",
        "pow", "atan2", "div", "sqrt", "rsqrt", "floordiv", "mod", "truncdiv", "fmod",
    )
)  # fmt: skip

COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))

ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
DTYPES = tuple(ITEMSIZE)
FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))
