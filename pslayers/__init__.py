"""Per-sample gradients for PyTorch: the weight, un-shared. See README.md, or ``help(pslayers.convert_model)``."""

from . import functional
from .check import Check, check_layer, check_model
from .convert import ConversionError, Report, convert_model, report, restore_model
from .expand import batch_size
from .gradients import accumulating, clear_grad_samples, expand_params, per_sample_grads, recording
from .layers import PSEmbedding, PSGroupNorm, PSLayer, PSLayerNorm, PSLinear

__all__ = [
    # converting
    "ConversionError",
    "Report",
    "convert_model",
    "report",
    "restore_model",
    # reading
    "accumulating",
    "batch_size",
    "clear_grad_samples",
    "expand_params",
    "per_sample_grads",
    "recording",
    # checking
    "Check",
    "check_layer",
    "check_model",
    # layers
    "PSEmbedding",
    "PSGroupNorm",
    "PSLayer",
    "PSLayerNorm",
    "PSLinear",
    # ops
    "functional",
]

__version__ = "0.1.0"
