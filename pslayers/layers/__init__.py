"""Replacement layers: torch's own, with per-sample weights."""

from ..modules.base import PSLayer
from .activation import PSPReLU
from .adaptive import PSAdaptiveLogSoftmaxWithLoss
from .attention import PSMultiheadAttention, PSNonDynamicallyQuantizableLinear
from .batch_norm import PSBatchNorm1d, PSBatchNorm2d, PSBatchNorm3d, PSSyncBatchNorm
from .conv import PSConv1d, PSConv2d, PSConv3d, PSConvTranspose1d, PSConvTranspose2d, PSConvTranspose3d
from .embedding import PSEmbedding, PSEmbeddingBag
from .instance_norm import PSInstanceNorm1d, PSInstanceNorm2d, PSInstanceNorm3d
from .linear import PSBilinear, PSLinear
from .norm import PSGroupNorm, PSLayerNorm, PSRMSNorm
from .rnn import PSGRU, PSLSTM, PSRNN
from .rnn_cell import PSGRUCell, PSLSTMCell, PSRNNCell

__all__ = [
    "PSAdaptiveLogSoftmaxWithLoss",
    "PSBatchNorm1d",
    "PSBatchNorm2d",
    "PSBatchNorm3d",
    "PSBilinear",
    "PSConv1d",
    "PSConv2d",
    "PSConv3d",
    "PSConvTranspose1d",
    "PSConvTranspose2d",
    "PSConvTranspose3d",
    "PSEmbedding",
    "PSEmbeddingBag",
    "PSGRU",
    "PSGRUCell",
    "PSGroupNorm",
    "PSInstanceNorm1d",
    "PSInstanceNorm2d",
    "PSInstanceNorm3d",
    "PSLSTM",
    "PSLSTMCell",
    "PSLayer",
    "PSLayerNorm",
    "PSLinear",
    "PSMultiheadAttention",
    "PSNonDynamicallyQuantizableLinear",
    "PSPReLU",
    "PSRMSNorm",
    "PSRNN",
    "PSRNNCell",
    "PSSyncBatchNorm",
]
