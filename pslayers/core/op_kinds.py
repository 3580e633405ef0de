"""What kind of op each of torch's functions is, by its name.

`parameters` and `attribution` have a rule for each kind. What is said of a name holds for the function and
for the method, with any arguments; a function that is not here may do anything to values and rows.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def functions(names: Iterable[str]) -> list[Any]:
    """What torch, Tensor and torch.nn.functional call so, in the version that runs."""
    found = [
        getattr(where, name, None)
        for name in names
        for where in (torch, Tensor, F)
        if where is Tensor or name[:2] != "__"  # `torch.__eq__` is the module's
    ]
    return [function for function in found if callable(function)]  # torch.float is a dtype


def with_in_place(names: Iterable[str]) -> list[str]:
    """Names, and those of the forms that write the result into the first argument."""
    return [form for name in names for form in (name, f"{name}_")]


def writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def apart(name: str) -> str:
    """What a function that writes its result into its first argument is called where it does not."""
    return f"__{name[3:]}" if name in _WRITES else name[:-1]


def _names(text: str, *forms: str) -> list[str]:
    return [form.format(name) for name in text.split() for form in forms or ("{}",)]


# ------------------------------------------------------------------------------------------- value by value
# of one tensor, whatever numbers there are beside it
OF_ONE = _names("""
    abs neg negative positive sign sgn round floor ceil trunc frac nan_to_num isnan isinf isfinite logical_not
    bitwise_not square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p logit sigmoid erf erfc erfinv
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sinc relu relu6 gelu silu elu celu selu mish
    leaky_relu softplus softsign logsigmoid hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink
    threshold __neg__ __abs__ __invert__
""")
CONVERTED = _names("float double half bfloat16 long int bool to type_as cpu contiguous")
COPIED = _names("clone detach")
# of several tensors, which broadcast
_OF_SEVERAL = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow maximum minimum
    clamp clamp_min clamp_max clip lerp addcmul addcdiv atan2 hypot xlogy eq ne lt le gt ge
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
"""
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor"
OF_SEVERAL = [
    *_names(_OF_SEVERAL),
    *_names(_OPERATORS, "__{}__", "__r{}__"),
    *_names("eq ne lt le gt ge", "__{}__"),
]
INTO_FIRST = [*_names(_OF_SEVERAL, "{}_"), *_names(_OPERATORS, "__i{}__")]
_WRITES = {"__setitem__", *_names(_OPERATORS, "__i{}__")}

# ----------------------------------------------------------------------------------------------- row by row
RANDOM = _names("""
    bernoulli rrelu dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
""")
# of all tensors that are given
BY_ROW = [
    *RANDOM,
    *_names("masked_fill prelu complex polar real imag conj view_as_real view_as_complex type cuda"),
    *_names("requires_grad_ detach_ copy_ fill_ zero_"),
]
# of the first one
PRODUCTS = _names("linear matmul mm __matmul__ bmm")
OF_VECTORS = _names("linear matmul mm __matmul__ layer_norm rms_norm")  # which one vector is no row of
OF_FIRST = [
    *{*PRODUCTS, *OF_VECTORS},
    *_names(
        "grouped_mm _grouped_mm grouped_mm_fallback group_norm instance_norm embedding one_hot interpolate"
        " pixel_shuffle pixel_unshuffle channel_shuffle local_response_norm tril triu"
    ),
    *_names("conv conv_transpose max_pool avg_pool", "{}1d", "{}2d", "{}3d"),
    *_names("adaptive_max_pool adaptive_avg_pool", "{}1d", "{}2d", "{}3d"),
]
RECURRENT = _names("lstm gru rnn_tanh rnn_relu")

# ------------------------------------------------------------------------------------------ along some dims
REDUCED = _names("sum mean prod amax amin argmax argmin max min median std var all any")
SORTED = _names("sort argsort topk")
PARTS = _names("chunk split tensor_split narrow")
_OTHERS = """
    logsumexp var_mean std_mean nansum nanmean cumsum cumprod logcumsumexp cummax cummin
    softmax log_softmax softmin
"""
_TRANSFORMS = "fft ifft rfft irfft hfft ihfft"
# which argument says along which of them, and what it is by default (None: all)
ALONG: dict[str, tuple[int, int | tuple[int, ...] | None]] = {
    **dict.fromkeys([*REDUCED, *_names(_OTHERS), "select", "narrow"], (1, None)),
    **dict.fromkeys(["glu", "sort", "argsort"], (1, -1)),
    **dict.fromkeys(["chunk", "split", "tensor_split"], (2, 0)),
    **dict.fromkeys(["norm", "linalg_norm", "linalg_vector_norm"], (2, None)),
    **dict.fromkeys(["topk", "diff"], (2, -1)),
    "normalize": (2, 1),
    **dict.fromkeys(_names(_TRANSFORMS, "fft_{}"), (2, -1)),
    **dict.fromkeys(_names(_TRANSFORMS, "fft_{}2"), (2, (-2, -1))),
    **dict.fromkeys(_names(_TRANSFORMS, "fft_{}n"), (2, None)),
    **dict.fromkeys(_names("fft_fftshift fft_ifftshift"), (1, None)),
    "gumbel_softmax": (4, -1),
}

# ----------------------------------------------------------------------------------- shapes, indices, makers
RESHAPED = _names("view reshape view_as reshape_as flatten unflatten ravel squeeze")
TURNED = _names("permute transpose movedim moveaxis swapaxes swapdims t")
JOINED = _names("cat concat concatenate")
MOVED = _names("flip roll repeat_interleave repeat tile")
GATHERED = _names("gather take_along_dim")
NONZERO = _names("nonzero argwhere")
PUT = _names("index_copy index_add index_reduce scatter scatter_add scatter_reduce")
MADE_LIKE = _names("zeros ones empty full", "{}_like", "new_{}")
MADE = [*_names("zeros ones empty full"), *MADE_LIKE]
DRAWN_LIKE = _names("rand randn randint", "{}_like")
# of sums over samples again one: of several tensors; of one, and of constants; of the first, by constants
ADDED = frozenset(_names("add sub rsub __add__ __radd__ __sub__ __rsub__"))
LINEAR = frozenset(
    [
        *(*RESHAPED, *TURNED, *PARTS, *CONVERTED, *COPIED),
        *_names("unsqueeze expand select unbind __getitem__ sum mean neg negative __neg__"),
        *_names("mul multiply __mul__ __rmul__ matmul __matmul__ mm mv dot"),
    ]
)
DIVIDED = frozenset(_names("div divide true_divide __truediv__"))
# of which it is known that they draw no random numbers
DRAW_NOTHING = frozenset([*OF_ONE, *OF_SEVERAL, *PRODUCTS, *REDUCED, *RESHAPED, *TURNED, *JOINED, *CONVERTED])

# ---------------------------------------------------------------------------------------- what a tensor says
# whatever its values are
PROPERTIES = _names("""
    shape dtype device ndim layout is_cuda is_cpu is_leaf is_sparse is_quantized is_meta itemsize nbytes grad
    grad_fn is_nested
""")
READ = _names("""
    size dim ndimension numel nelement element_size stride storage_offset get_device is_floating_point
    is_complex is_contiguous is_same_size __len__ __hash__ __repr__
""")
# in numbers of Python's: one for each of its values; or one, or a text, for all of them
VALUES = _names("item tolist __bool__ __float__ __int__ __index__")
TO_NUMBERS = [*VALUES, *_names("equal allclose is_nonzero __contains__ __format__")]
TO_ARRAYS = _names("numpy __array__")
