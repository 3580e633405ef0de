"""Replacement layers: torch's own, with per-sample weights. Each file's `__all__` says which; they are only
collected here.
"""

from ..modules.base import PSLayer
from . import (
    activation,
    adaptive,
    attention,
    batch_norm,
    conv,
    embedding,
    instance_norm,
    linear,
    norm,
    rnn,
    rnn_cell,
)
from .activation import *
from .adaptive import *
from .attention import *
from .batch_norm import *
from .conv import *
from .embedding import *
from .instance_norm import *
from .linear import *
from .norm import *
from .rnn import *
from .rnn_cell import *

__all__: list[str] = ["PSLayer"]
__all__ += activation.__all__
__all__ += adaptive.__all__
__all__ += attention.__all__
__all__ += batch_norm.__all__
__all__ += conv.__all__
__all__ += embedding.__all__
__all__ += instance_norm.__all__
__all__ += linear.__all__
__all__ += norm.__all__
__all__ += rnn.__all__
__all__ += rnn_cell.__all__
