"""Ops with per-sample weights: each sample has a weight of its own, or the weight is one, expanded to the
batch.
"""

from .activation import prelu
from .attention import in_projection, multi_head_attention
from .bags import embedding_bag
from .batch_norm import batch_norm
from .bilinear import bilinear
from .contraction import einsum
from .conv import conv1d, conv2d, conv3d
from .conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d
from .embedding import embedding
from .grouped import grouped_mm
from .linear import linear
from .norm import group_norm, instance_norm, layer_norm, rms_norm
from .rnn import gru, gru_cell, lstm, lstm_cell, rnn_relu, rnn_relu_cell, rnn_tanh, rnn_tanh_cell

__all__ = [
    "batch_norm",
    "bilinear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "einsum",
    "embedding",
    "embedding_bag",
    "group_norm",
    "grouped_mm",
    "gru",
    "gru_cell",
    "in_projection",
    "instance_norm",
    "layer_norm",
    "linear",
    "lstm",
    "lstm_cell",
    "multi_head_attention",
    "prelu",
    "rms_norm",
    "rnn_relu",
    "rnn_relu_cell",
    "rnn_tanh",
    "rnn_tanh_cell",
]
