"""The cells of the study: a model, inputs, a target and a loss for a batch size `b` and a size."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import drawn
from . import larger_networks as larger
from . import networks as nets
from . import own_modules as own
from .registry import CASES, Problem, case, classified


def _layer(layer: nn.Module, *inputs: Tensor) -> Problem:
    """A layer by itself: the squared distance to targets at random."""
    with torch.no_grad():
        shape = layer(*inputs).shape
    return Problem(layer, inputs, torch.randn(shape), F.mse_loss)


# The networks that the study is about


@case("networks")
def mlp(b: int, _: int) -> Problem:
    """784-512-256-10."""
    return classified(nets.mlp(512), torch.randn(b, 784))


@case("networks")
def tutorial_cnn(b: int, _: int) -> Problem:
    """28x28."""
    return classified(nets.TutorialCNN(), torch.randn(b, 1, 28, 28))


@case("networks")
def cifar_cnn(b: int, _: int) -> Problem:
    """32x32."""
    return classified(nets.cifar_cnn(), torch.randn(b, 3, 32, 32))


@case("networks")
def resnet18(b: int, _: int) -> Problem:
    """32x32."""
    return classified(nets.resnet18(), torch.randn(b, 3, 32, 32))


@case("networks")
def depthwise_cnn(b: int, _: int) -> Problem:
    """32x32."""
    return classified(nets.depthwise_cnn(), torch.randn(b, 3, 32, 32))


@case("networks")
def audio_conv1d(b: int, _: int) -> Problem:
    """2,048 values of sound."""
    return classified(nets.AudioStack(), torch.randn(b, 1, 2048))


@case("networks")
def large_vocabulary(b: int, _: int) -> Problem:
    """64 of 50,000 words."""
    return classified(nets.bag_of_words(50_000, 64, 4), nets.tokens(b, 64, 50_000), 4)


@case("recurrent", axis="T", sizes=(64, 256))
def lstm(b: int, t: int) -> Problem:
    """One layer, 100 wide."""
    return classified(nets.Recurrent(nn.LSTM(100, 100, batch_first=True), 10), torch.randn(b, t, 100))


@case("recurrent", axis="T", sizes=(64, 256))
def lstm_2_bidirectional(b: int, t: int) -> Problem:
    """Two layers, both directions."""
    rnn = nn.LSTM(100, 100, 2, batch_first=True, bidirectional=True)
    return classified(nets.Recurrent(rnn, 10), torch.randn(b, t, 100))


@case("recurrent", axis="T", sizes=(64, 256))
def gru(b: int, t: int) -> Problem:
    """One layer, 100 wide."""
    return classified(nets.Recurrent(nn.GRU(100, 100, batch_first=True), 10), torch.randn(b, t, 100))


@case("recurrent", axis="T", sizes=(64, 256))
def gru_2_bidirectional(b: int, t: int) -> Problem:
    """Two layers, both directions."""
    rnn = nn.GRU(100, 100, 2, batch_first=True, bidirectional=True)
    return classified(nets.Recurrent(rnn, 10), torch.randn(b, t, 100))


@case("transformers", axis="D", sizes=(128, 256, 512))
def transformer(b: int, d: int) -> Problem:
    """T=64."""
    return classified(nets.transformer(d), torch.randn(b, 64, 32))


@case("transformers", axis="D", sizes=(128,))
def encoder(b: int, d: int) -> Problem:
    """T=64."""
    return classified(nets.encoder(d), torch.randn(b, 64, 32))


# Modules of one's own, which have no replacement

OWN: dict[str, Any] = {"group": "own", "batch_sizes": (16, 64)}


@case(**OWN)
def own_masked(b: int, _: int) -> Problem:
    """784-512-512-10."""
    hidden = own.Masked(784, 512), nn.ReLU(), own.Masked(512, 512), nn.ReLU()
    return classified(nn.Sequential(*hidden, nn.Linear(512, 10)), torch.randn(b, 784))


@case(**OWN)
def own_standardized(b: int, _: int) -> Problem:
    """32x32."""
    convs = (own.Standardized(i, o, 3, 2, 1) for i, o in ((3, 32), (32, 64), (64, 64)))
    layers = [layer for conv in convs for layer in (conv, nn.ReLU())]
    return classified(nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10)), torch.randn(b, 3, 32, 32))


@case(**OWN)
def own_adapted(b: int, _: int) -> Problem:
    """256-1024-256, T=64."""
    model = nn.Sequential(own.Adapted(256, 1024), nn.GELU(), own.Adapted(1024, 256))
    return _layer(model, torch.randn(b, 64, 256))


@case(**OWN)
def own_heads(b: int, _: int) -> Problem:
    """Two blocks, 256 wide, 4 heads, T=64."""
    return _layer(nn.Sequential(own.Heads(256, 4), own.Heads(256, 4)), torch.randn(b, 64, 256))


@case(**OWN)
def own_experts(b: int, _: int) -> Problem:
    """8 experts, 128 wide."""
    return classified(nn.Sequential(own.Experts(128, 8), nn.Linear(128, 10)), torch.randn(b, 128))


@case(**OWN)
def own_cell(b: int, _: int) -> Problem:
    """128 wide, T=64."""
    return classified(nn.Sequential(own.Cell(64, 128), nn.Linear(128, 10)), torch.randn(b, 64, 64))


@case(**OWN)
def own_selective(b: int, _: int) -> Problem:
    """128 wide, T=64."""
    return _layer(own.Selective(128), torch.randn(b, 64, 128))


# fast-dpsgd's models (its CIFAR network is above)

DPSGD: dict[str, Any] = {"group": "fast-dpsgd", "batch_sizes": (16, 64, 256)}


@case(**DPSGD)
def logistic(b: int, _: int) -> Problem:
    """104-1, for the Adult data."""
    return Problem(
        nn.Linear(104, 1),
        (torch.randn(b, 104),),
        torch.rand(b, 1).round(),
        F.binary_cross_entropy_with_logits,
    )


@case(**DPSGD)
def ffnn(b: int, _: int) -> Problem:
    """104-50-2."""
    return classified(nn.Sequential(nn.Linear(104, 50), nn.ReLU(), nn.Linear(50, 2)), torch.randn(b, 104), 2)


@case(**DPSGD)
def mnist_cnn(b: int, _: int) -> Problem:
    """28x28."""
    return classified(nets.mnist_cnn(), torch.randn(b, 1, 28, 28))


@case(**DPSGD)
def imdb_embedding(b: int, _: int) -> Problem:
    """256 of 10,000 words."""
    return classified(nets.bag_of_words(10_000, 16, 2), nets.tokens(b, 256, 10_000), 2)


@case(**DPSGD)
def imdb_lstm(b: int, _: int) -> Problem:
    """256 of 10,000 words."""
    rnn = nn.LSTM(100, 100, batch_first=True)
    return classified(nets.Recurrent(rnn, 2, 10_000), nets.tokens(b, 256, 10_000), 2)


# Opacus' benchmark of single layers, with its sizes

LAYERS: dict[str, Any] = {"group": "layers", "batch_sizes": (16, 64, 256)}


@case(**LAYERS)
def layer_linear(b: int, _: int) -> Problem:
    """512 to 512."""
    return _layer(nn.Linear(512, 512), torch.randn(b, 512))


@case("layers", batch_sizes=(16, 64))
def layer_conv(b: int, _: int) -> Problem:
    """64 to 64 channels, kernel 8; at B = 256 the peers' unfolded inputs alone take 16 GiB."""
    return _layer(nn.Conv2d(64, 64, 8), torch.randn(b, 64, 50, 100))


@case(**LAYERS)
def layer_layernorm(b: int, _: int) -> Problem:
    """64 values."""
    return _layer(nn.LayerNorm(64), torch.randn(b, 64))


@case(**LAYERS)
def layer_instancenorm(b: int, _: int) -> Problem:
    """256 channels of 64 values."""
    return _layer(nn.InstanceNorm1d(256, affine=True), torch.randn(b, 256, 64))


@case(**LAYERS)
def layer_groupnorm(b: int, _: int) -> Problem:
    """256 channels in 16 groups."""
    return _layer(nn.GroupNorm(16, 256), torch.randn(b, 256))


@case(**LAYERS)
def layer_embedding(b: int, _: int) -> Problem:
    """One of 20,000 words, 100 values."""
    return _layer(nn.Embedding(20_000, 100), torch.randint(0, 20_000, (b,)))


@case(**LAYERS)
def layer_attention(b: int, _: int) -> Problem:
    """64 queries, 128 keys, 100 values in 4 heads."""
    layer = nets.OutputOnly(nn.MultiheadAttention(100, 4, batch_first=True))
    keys = torch.randn(b, 128, 100)
    return _layer(layer, torch.randn(b, 64, 100), keys, torch.randn(b, 128, 100))


@case(**LAYERS)
def layer_rnn(b: int, _: int) -> Problem:
    """100 to 100, T=128."""
    return _layer(nets.OutputOnly(nn.RNN(100, 100, batch_first=True)), torch.randn(b, 128, 100))


@case(**LAYERS)
def layer_gru(b: int, _: int) -> Problem:
    """100 to 100, T=128."""
    return _layer(nets.OutputOnly(nn.GRU(100, 100, batch_first=True)), torch.randn(b, 128, 100))


@case(**LAYERS)
def layer_lstm(b: int, _: int) -> Problem:
    """100 to 100, T=128."""
    return _layer(nets.OutputOnly(nn.LSTM(100, 100, batch_first=True)), torch.randn(b, 128, 100))


# Sweeps over width and time at one batch size, for the plots


@case("sweeps", axis="D", sizes=(64, 128, 256, 512, 1024, 2048), batch_sizes=(64,))
def mlp_width(b: int, d: int) -> Problem:
    """784-D-(D/2)-10."""
    return classified(nets.mlp(d), torch.randn(b, 784))


@case("sweeps", axis="T", sizes=(16, 32, 64, 128, 256, 512), batch_sizes=(64,))
def lstm_time(b: int, t: int) -> Problem:
    """As `lstm`."""
    return lstm(b, t)


@case("sweeps", axis="T", sizes=(16, 32, 64, 128, 256, 512), batch_sizes=(16,))
def transformer_time(b: int, t: int) -> Problem:
    """As `transformer`, D=128."""
    return classified(nets.transformer(128), torch.randn(b, t, 32))


# Cost lines: a clipped step by factors and by dense rows beside a plain one, each time one size grows from
# the same base on (`lines.py`); and a model that is in none of them, to hold what they predict against

LINES: dict[str, Any] = {
    "group": "lines",
    "task": "clipped",
    "engines": ("plain", "pslayers-clipping", "pslayers-clipping-rows"),
}


def gpt_of(
    b: int, t: int = 64, width: int = 256, layers: int = 2, vocabulary: int = 1024, positions: int = 0
) -> Problem:
    """GPT-2's form, its head the table of tokens."""
    model = larger.LanguageModel(vocabulary, vocabulary, positions or t, width, layers, tied=True)
    return larger.next_tokens(model, b, t, vocabulary)


def _mlp(b: int, width: int = 512, layers: int = 2) -> Problem:
    """784, so many layers of one width, 10."""
    widths = [784, *[width] * layers]
    hidden = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return classified(nn.Sequential(*hidden, nn.Linear(width, 10)), torch.randn(b, 784))


@case(**LINES, batch_sizes=(1, 2, 4, 8, 16, 32))
def gpt_by_batch(b: int, _: int) -> Problem:
    """2 layers, 256 wide, 64 of 1,024 words."""
    return gpt_of(b)


@case(**LINES, axis="D", sizes=(64, 128, 256, 512, 1024), batch_sizes=(8,))
def gpt_by_width(b: int, d: int) -> Problem:
    """The same at another width."""
    return gpt_of(b, width=d)


@case(**LINES, axis="T", sizes=(16, 32, 64, 128, 256, 512), batch_sizes=(8,))
def gpt_by_time(b: int, t: int) -> Problem:
    """The same for other lengths."""
    return gpt_of(b, t)


@case(**LINES, axis="L", sizes=(1, 2, 4, 8, 16), batch_sizes=(8,))
def gpt_by_depth(b: int, layers: int) -> Problem:
    """The same with other numbers of layers."""
    return gpt_of(b, layers=layers)


@case(**LINES, batch_sizes=(4, 16, 64, 256))
def mlp_by_batch(b: int, _: int) -> Problem:
    """784-512-512-10."""
    return _mlp(b)


@case(**LINES, axis="D", sizes=(128, 256, 512, 1024, 2048), batch_sizes=(64,))
def mlp_by_width(b: int, d: int) -> Problem:
    """784-D-D-10."""
    return _mlp(b, d)


@case(**LINES, axis="L", sizes=(1, 2, 4, 8, 16), batch_sizes=(64,))
def mlp_by_depth(b: int, layers: int) -> Problem:
    """784, so many layers 512 wide, 10."""
    return _mlp(b, layers=layers)


@case(**(LINES | {"group": "held"}), axis="T", sizes=(64,), batch_sizes=(2,))
def gpt2_small(b: int, t: int) -> Problem:
    """GPT-2's smallest: 12 layers, 768 wide, 50,257 words."""
    return gpt_of(b, t, 768, 12, 50_257, 1024)


# Networks at random: the axis is the seed

DRAWN: dict[str, Any] = {"group": "drawn", "axis": "seed", "sizes": tuple(range(28)), "batch_sizes": (32,)}


@case(**DRAWN)
def drawn_rows(b: int, seed: int) -> Problem:
    """Of seven families (`drawn.py`)."""
    return drawn.network(b, seed)


@case(**DRAWN, task="clipped")
def drawn_clipped(b: int, seed: int) -> Problem:
    """The same."""
    return drawn.network(b, seed)


# Clipped steps, of which no rows are wanted

CLIPPED: dict[str, Any] = {"group": "clipped", "task": "clipped"}


def _language(b: int, t: int, vocabulary: int, tied: bool) -> Problem:
    model = larger.LanguageModel(vocabulary, vocabulary, t, tied=tied)
    return larger.next_tokens(model, b, t, vocabulary)


@case(**CLIPPED, axis="T", sizes=(16, 100), batch_sizes=(8,))
def gpt(b: int, t: int) -> Problem:
    """4 layers, 256 wide, GPT-2's vocabulary."""
    return _language(b, t, 50_257, tied=False)


@case(**CLIPPED, axis="T", sizes=(16, 100), batch_sizes=(8,))
def gpt_tied(b: int, t: int) -> Problem:
    """The same, its head the table of tokens."""
    return _language(b, t, 50_257, tied=True)


@case(**CLIPPED, axis="T", sizes=(64,), batch_sizes=(32,))
def gpt_8192(b: int, t: int) -> Problem:
    """8,192 words."""
    return _language(b, t, 8192, tied=False)


@case(**CLIPPED, axis="T", sizes=(64,), batch_sizes=(32,))
def gpt_8192_tied(b: int, t: int) -> Problem:
    """The same, tied."""
    return _language(b, t, 8192, tied=True)


@case(**CLIPPED, axis="T", sizes=(16, 64, 256, 1024), batch_sizes=(2,))
def gpt_time(b: int, t: int) -> Problem:
    """As `gpt_8192`."""
    return _language(b, t, 8192, tied=False)


@case(**CLIPPED, axis="T", sizes=(16, 64, 256, 1024), batch_sizes=(2,))
def gpt_tied_time(b: int, t: int) -> Problem:
    """As `gpt_8192_tied`."""
    return _language(b, t, 8192, tied=True)


@case(**CLIPPED, axis="T", sizes=(128,), batch_sizes=(32, 128))
def bert_last_part(b: int, t: int) -> Problem:
    """4 layers, 256 wide; the last one and the head are trained."""
    return classified(larger.bert_for_its_last_part(30_522, 2, t), nets.tokens(b, t, 30_522), 2)


@case(**CLIPPED, batch_sizes=(32, 256))
def mlp_wide(b: int, _: int) -> Problem:
    """5120-2560-1280-10."""
    layers = nn.Linear(5120, 2560), nn.ReLU(), nn.Linear(2560, 1280), nn.ReLU(), nn.Linear(1280, 10)
    return classified(nn.Sequential(*layers), torch.randn(b, 5120))


@case(**CLIPPED, batch_sizes=(2,))
def resnet18_224(b: int, _: int) -> Problem:
    """224x224, with the first layers of the network for 32x32: 49 times its positions."""
    return classified(nets.resnet18(), torch.randn(b, 3, 224, 224))


@case(**CLIPPED, batch_sizes=(32,))
def vgg11_32(b: int, _: int) -> Problem:
    """32x32."""
    return classified(larger.vgg11(32), torch.randn(b, 3, 32, 32))


@case(**CLIPPED, batch_sizes=(2,))
def vgg11_224(b: int, _: int) -> Problem:
    """224x224."""
    return classified(larger.vgg11(224), torch.randn(b, 3, 224, 224))


@case(**CLIPPED, batch_sizes=(16,))
def vit(b: int, _: int) -> Problem:
    """4 layers, 192 wide, T=197."""
    return classified(larger.ViT(), torch.randn(b, 3, 224, 224))


@case(**CLIPPED, batch_sizes=(16,))
def swin(b: int, _: int) -> Problem:
    """Three stages from 48 wide on, 112x112."""
    return classified(larger.swin(), torch.randn(b, 3, 112, 112))


@case(**CLIPPED, batch_sizes=(16,))
def convnext(b: int, _: int) -> Problem:
    """Three stages of ConvNeXt-Atto, 96x96."""
    return classified(larger.convnext(), torch.randn(b, 3, 96, 96))


@case(**CLIPPED, batch_sizes=(64,))
def embedding_bag(b: int, _: int) -> Problem:
    """128 of 20,000 words, 128 wide."""
    return classified(larger.Bag(20_000, 128, 4), nets.tokens(b, 128, 20_000), 4)


@case(**CLIPPED, batch_sizes=(32,))
def text_lstm(b: int, _: int) -> Problem:
    """128 of 10,000 words."""
    rnn = nn.LSTM(100, 100, batch_first=True)
    return classified(nets.Recurrent(rnn, 2, 10_000), nets.tokens(b, 128, 10_000), 2)


@case(**CLIPPED, batch_sizes=(32,))
def text_gru(b: int, _: int) -> Problem:
    """128 of 10,000 words."""
    rnn = nn.GRU(100, 100, batch_first=True)
    return classified(nets.Recurrent(rnn, 2, 10_000), nets.tokens(b, 128, 10_000), 2)


def _again(name: str, task: str, b: int) -> None:
    """Register a case from above for another task."""
    options: dict[str, Any] = {"sizes": CASES[name].sizes[:1], "batch_sizes": (b,)}
    CASES[f"{name}_{task}"] = replace(CASES[name], name=f"{name}_{task}", group=task, task=task, **options)


for name, b in {"resnet18": 32, "depthwise_cnn": 32, "imdb_embedding": 64}.items():
    _again(name, "clipped", b)

# Gram matrices of a batch

for name, b in {"mlp": 64, "cifar_cnn": 16, "transformer": 16, "gpt_8192": 8, "text_lstm": 16}.items():
    _again(name, "gram", b)
