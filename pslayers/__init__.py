"""Per-sample gradients for PyTorch: the weight, un-shared. See README.md, or
``help(pslayers.convert_model)``.
"""

from . import torch_api  # noqa: F401  # isort: skip  # first: it says so where torch is too old

from . import functional, layers
from .attribution.ragged import sample_ids
from .check import Check, check_layer, check_model
from .convert import ConversionError, convert_model, restore_model
from .core.context import batch_size
from .core.tuning import tuning
from .factored import FactoredGrad, FactoredGrads, clipping, factored, reweighting
from .gradients import accumulating, clear_grad_samples, expand_params, per_sample_grads, recording, streaming
from .jacobians import jacobian_gram, per_sample_jacobians
from .layers import *
from .replace import replace_batch_norm
from .reports import Report, report

__all__ = [
    # converting a model, and back
    "convert_model",
    "restore_model",
    "replace_batch_norm",
    "report",
    "Report",
    "ConversionError",
    # reading per-sample gradients
    "per_sample_grads",
    "per_sample_jacobians",
    "expand_params",
    "recording",
    "accumulating",
    "streaming",
    "batch_size",
    "sample_ids",
    "clear_grad_samples",
    # computing with them, without forming them
    "factored",
    "FactoredGrads",
    "FactoredGrad",
    "clipping",
    "reweighting",
    "jacobian_gram",
    # checking them
    "check_model",
    "check_layer",
    "Check",
    # speed
    "tuning",
    # ops
    "functional",
]
__all__ += layers.__all__

__version__ = "0.1.0"
