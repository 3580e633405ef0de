"""Per-sample gradients for PyTorch: the weight, un-shared. See README.md, or ``help(pslayers.convert_model)``."""

from . import functional
from .check import Check, check_layer, check_model
from .convert import ConversionError, Report, convert_model, report, restore_model
from .expand import batch_size
from .gradients import accumulating, clear_grad_samples, expand_params, per_sample_grads, recording
from .layers import (
    PSLSTM,
    PSConv1d,
    PSConv2d,
    PSConv3d,
    PSEmbedding,
    PSGroupNorm,
    PSLayer,
    PSLayerNorm,
    PSLinear,
)

__all__ = [
    # converting a model, and back
    "convert_model",
    "restore_model",
    "report",
    "Report",
    "ConversionError",
    # reading per-sample gradients
    "per_sample_grads",
    "expand_params",
    "recording",
    "accumulating",
    "batch_size",
    "clear_grad_samples",
    # checking them
    "check_model",
    "check_layer",
    "Check",
    # layers
    "PSLayer",
    "PSLinear",
    "PSConv1d",
    "PSConv2d",
    "PSConv3d",
    "PSEmbedding",
    "PSLayerNorm",
    "PSGroupNorm",
    "PSLSTM",
    # ops
    "functional",
]

__version__ = "0.1.0"
