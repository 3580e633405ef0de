"""Public architectures as cells of the study, small and with random weights; they need
`benchmarks/requirements.txt`.

    python -m benchmarks.study --model benchmarks.architectures:gpt2 benchmarks.architectures:vit
    --batch-sizes 16

They are those of timm and transformers as these come, with what has no replacement in them (GPT-2's Conv1D,
class tokens, LayerScale, norms of their own, tables of position biases): none was looked at when the rules
for speed were made.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

from .public_models import library
from .registry import Problem


class _Pooled(nn.Module):
    """Of what a language model returns, one vector a sample."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = getattr(self.model(ids), self.name)
        return out if out.ndim == 2 else out.mean(1)


def _vision(name: str, size: int, b: int, **options: Any) -> Problem:
    model = library("timm").create_model(name, num_classes=10, **options)
    ps.replace_batch_norm(model)
    return Problem(model, (torch.randn(b, 3, size, size),), torch.randint(0, 10, (b,)), F.cross_entropy)


def _language(kind: str, config: str, b: int, name: str, **options: Any) -> Problem:
    transformers = library("transformers")
    model = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=1000, **options))
    ids = torch.randint(3, 1000, (b, 64))
    return Problem(_Pooled(model, name), (ids,), torch.randint(0, 2, (b,)), F.cross_entropy)


def resnet50(b: int) -> Problem:
    """64x64, its BatchNorms replaced."""
    return _vision("resnet50", 64, b)


def convnext(b: int) -> Problem:
    """ConvNeXt-Atto, 96x96."""
    return _vision("convnext_atto", 96, b)


def poolformer(b: int) -> Problem:
    """PoolFormer-S12, 64x64."""
    return _vision("poolformer_s12", 64, b)


def vit(b: int) -> Problem:
    """ViT-Tiny, patches of 16, 96x96."""
    return _vision("vit_tiny_patch16_224", 96, b, img_size=96)


def swin(b: int) -> Problem:
    """Swin of three stages, width 48, windows of 7, 56x56."""
    sizes: dict[str, Any] = {"embed_dim": 48, "depths": (2, 2, 2), "num_heads": (2, 4, 8), "window_size": 7}
    return _vision("swin_tiny_patch4_window7_224", 56, b, img_size=56, drop_path_rate=0.0, **sizes)


def bert(b: int) -> Problem:
    """4 layers of width 128, 64 tokens."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 512}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _language("BertForSequenceClassification", "BertConfig", b, "logits", **sizes, **off)


def albert(b: int) -> Problem:
    """One layer of width 128 used 6 times, 64 tokens."""
    sizes = {
        "embedding_size": 64,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    return _language("AlbertForSequenceClassification", "AlbertConfig", b, "logits", **sizes, **off)


def gpt2(b: int) -> Problem:
    """4 layers of width 128, 64 tokens."""
    off = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _language(
        "GPT2Model", "GPT2Config", b, "last_hidden_state", n_embd=128, n_layer=4, n_head=2, **off
    )


def llama(b: int) -> Problem:
    """4 layers of width 128, 64 tokens."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    return _language(
        "LlamaModel", "LlamaConfig", b, "last_hidden_state", intermediate_size=344, use_cache=False, **sizes
    )


def mixtral(b: int) -> Problem:
    """4 layers of width 128, 4 experts of which each token goes to 2, 64 tokens."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
        "experts_implementation": "eager",
    }
    return _language(
        "MixtralModel", "MixtralConfig", b, "last_hidden_state", use_cache=False, **sizes, **experts
    )


def t5(b: int) -> Problem:
    """The encoder: 3 layers of width 128, 64 tokens."""
    sizes = {"d_model": 128, "d_kv": 32, "num_layers": 3, "num_heads": 4, "d_ff": 512}
    return _language("T5EncoderModel", "T5Config", b, "last_hidden_state", dropout_rate=0.0, **sizes)
