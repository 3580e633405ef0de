"""Models of transformers with labels, as `Trainer` trains them: in training mode, by the loss that the model itself returns.

A case is a model of `transformers_models` with a head: the same config and inputs, the head's class, and what its labels are. Every
rate of dropout is 0, and BatchNorm is in eval mode; all samples have as many labels, so that a mean over labels is one over samples.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .case import EXACT, SINGLE, Inputs, _without_dropout, ids
from .libraries import library
from .transformers_models import SPEECH
from .truth import losses


def _classes(n: int, *shape: int, name: str = "labels") -> Inputs:
    return {name: torch.randint(0, 2, (n, *shape))}


# what is added to the inputs of n samples, by the kind of head
LABELS: dict[str, Callable[[int], Inputs]] = {
    "none": lambda n: {},
    "tokens": partial(ids, name="labels"),
    "target": lambda n: ids(n, 5, "labels"),
    "class": _classes,
    "tags": lambda n: _classes(n, 8),
    "span": lambda n: {"start_positions": torch.randint(0, 4, (n,)), "end_positions": torch.randint(3, 5, (n,))},
    "choice": lambda n: ids(n, 16, "input_ids") | _classes(n),
    "map": lambda n: _classes(n, 16, 16),
    "letters": lambda n: ids(n, 3, "labels"),
    "frames": lambda n: {"labels": nn.functional.one_hot(torch.randint(0, 2, (n, 14)), 2).double()},
    "patches": lambda n: {"bool_masked_pos": (torch.arange(16) % 3 == 0).expand(n, 16)},
}


@dataclass(frozen=True)
class TrainingCase:
    """A model and what it is trained with.

    `reduction`: what the model's loss is over samples. `ways`: how it is trained beside "plain": "checkpoint" (each layer's
    activations computed again), "reentrant" (the same by the old kind of checkpoint), "lora" (PEFT's adapters on all linear maps).
    """

    name: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[int], Inputs]
    labels: str
    reduction: str = "mean"
    single: bool = False  # whether a part of it computes in float32
    double: bool = True  # whether it runs in float64 at all
    ways: tuple[str, ...] = field(default=("plain",))

    @property
    def tolerance(self) -> float:
        """How far a row may be from the loop's, relative to the parameter's largest value."""
        return SINGLE if self.single or not self.double else EXACT

    def make(self, way: str = "plain") -> nn.Module:
        """The model in training mode, every parameter moved off its initial value, with adapters where the way has them."""
        torch.manual_seed(0)
        transformers: Any = library("transformers")
        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, self.model)
        config = cls.config_class(**copy.deepcopy(self.config))
        _no_dropout_in(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = cls(config)
        if way == "lora":
            model = _adapted(model)
        if self.double:
            model.double()
        _without_dropout(model)
        for module in model.train().modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        for param in model.parameters():
            param.data.add_(0.02 * torch.randn_like(param))
        return model

    def batch(self, size: int) -> Inputs:
        """Inputs with labels for `size` samples."""
        torch.manual_seed(1)
        inputs = self.inputs(size) | LABELS[self.labels](size)
        if self.labels == "choice":
            inputs["input_ids"] = inputs["input_ids"].view(size, 2, 8)
        if self.labels == "target":
            inputs.pop("decoder_input_ids", None)
        return inputs if self.double else {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}

    def loss(self, output: Any, size: int) -> Tensor:
        """The loss of a batch of `size` samples: the model's own, or one made of its outputs."""
        loss: Tensor = losses(output, size).mean() if self.labels == "none" else output.loss
        return loss


def checkpointed(model: Any, reentrant: bool) -> None:
    """Let a model of transformers compute its layers' activations again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


def _no_dropout_in(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _no_dropout_in(value)


KEPT = ("plain", "checkpoint", "reentrant")
ADAPTED = (*KEPT, "lora")
CTC = {**SPEECH, "vocab_size": 50}
FRAMES = {**SPEECH, "tdnn_dim": [8] * 5, "xvector_output_dim": 8}

# the name of a model of `transformers_models`, the head's class, its labels, and what else is to be said
HEADS: list[tuple[str, str, str, dict[str, Any]]] = [
    # encoders of text
    ("bert", "BertForMaskedLM", "tokens", {"ways": ADAPTED}),
    ("bert", "BertForSequenceClassification", "class", {"ways": KEPT}),
    ("bert", "BertForTokenClassification", "tags", {}),
    ("bert", "BertForQuestionAnswering", "span", {}),
    ("bert", "BertForMultipleChoice", "choice", {"ways": KEPT}),
    ("bert", "BertForNextSentencePrediction", "class", {}),
    ("roberta", "RobertaForMultipleChoice", "choice", {}),
    ("distilbert", "DistilBertForQuestionAnswering", "span", {}),
    ("albert", "AlbertForMaskedLM", "tokens", {}),
    ("albert", "AlbertForMultipleChoice", "choice", {}),
    ("electra", "ElectraForMaskedLM", "tokens", {}),
    ("electra", "ElectraForTokenClassification", "tags", {"ways": KEPT}),
    ("deberta", "DebertaForTokenClassification", "tags", {}),
    ("deberta-v2", "DebertaV2ForMaskedLM", "tokens", {}),
    ("mpnet", "MPNetForQuestionAnswering", "span", {}),
    ("mobilebert", "MobileBertForMaskedLM", "tokens", {}),
    ("squeezebert", "SqueezeBertForSequenceClassification", "class", {}),
    ("fnet", "FNetForMaskedLM", "tokens", {}),
    ("longformer", "LongformerForTokenClassification", "tags", {}),
    ("funnel", "FunnelForMaskedLM", "tokens", {}),
    ("funnel", "FunnelForSequenceClassification", "class", {}),
    ("funnel", "FunnelForMultipleChoice", "choice", {}),
    ("xlnet", "XLNetLMHeadModel", "tokens", {}),
    ("xlnet", "XLNetForSequenceClassification", "class", {}),
    ("xlnet", "XLNetForMultipleChoice", "choice", {}),
    ("xlm", "XLMWithLMHeadModel", "tokens", {}),
    ("esm", "EsmForMaskedLM", "tokens", {}),
    ("modernbert", "ModernBertForMaskedLM", "tokens", {"ways": KEPT}),
    ("modernbert", "ModernBertForSequenceClassification", "class", {}),
    # decoders of text
    ("gpt2", "GPT2LMHeadModel", "tokens", {"ways": ADAPTED}),
    ("gpt2", "GPT2ForSequenceClassification", "class", {"config": {"pad_token_id": 0}}),
    ("gpt-neo", "GPTNeoForCausalLM", "tokens", {}),
    ("opt", "OPTForCausalLM", "tokens", {}),
    ("bloom", "BloomForTokenClassification", "tags", {}),
    ("llama", "LlamaForCausalLM", "tokens", {"ways": ADAPTED}),
    ("llama", "LlamaForSequenceClassification", "class", {}),
    ("qwen2", "Qwen2ForQuestionAnswering", "span", {}),
    ("qwen3", "Qwen3ForCausalLM", "tokens", {}),
    ("gemma2", "Gemma2ForCausalLM", "tokens", {}),
    ("phi3", "Phi3ForCausalLM", "tokens", {}),
    ("mamba", "MambaForCausalLM", "tokens", {}),
    # encoders with decoders
    ("t5", "T5ForConditionalGeneration", "target", {"ways": ADAPTED}),
    ("t5", "T5ForTokenClassification", "tags", {}),
    ("t5", "T5ForQuestionAnswering", "span", {}),
    ("switch", "SwitchTransformersForConditionalGeneration", "target", {}),
    ("longt5", "LongT5ForConditionalGeneration", "target", {}),
    ("bart", "BartForConditionalGeneration", "target", {"ways": ADAPTED}),
    ("pegasus", "PegasusForConditionalGeneration", "target", {}),
    ("marian", "MarianMTModel", "target", {}),
    ("m2m100", "M2M100ForConditionalGeneration", "target", {}),
    ("led", "LEDForConditionalGeneration", "target", {}),
    ("prophetnet", "ProphetNetForConditionalGeneration", "target", {"reduction": "sum"}),
    # images
    ("vit", "ViTForImageClassification", "class", {"ways": ADAPTED}),
    ("vit", "ViTForMaskedImageModeling", "patches", {"config": {"encoder_stride": 4}}),
    ("deit", "DeiTForImageClassification", "class", {}),
    ("beit", "BeitForImageClassification", "class", {"ways": KEPT}),
    (
        "beit",
        "BeitForSemanticSegmentation",
        "map",
        {"config": {"out_indices": [0, 1, 0, 1], "use_auxiliary_head": False, "pool_scales": [1, 2]}},
    ),
    ("dinov2", "Dinov2ForImageClassification", "class", {}),
    ("swin", "SwinForImageClassification", "class", {"ways": KEPT}),
    ("swinv2", "Swinv2ForImageClassification", "class", {"ways": KEPT}),
    ("convnext", "ConvNextForImageClassification", "class", {}),
    ("convnextv2", "ConvNextV2ForImageClassification", "class", {}),
    ("segformer", "SegformerForSemanticSegmentation", "map", {"config": {"decoder_hidden_size": 8}}),
    ("segformer", "SegformerForImageClassification", "class", {}),
    ("resnet", "ResNetForImageClassification", "class", {}),
    ("poolformer", "PoolFormerForImageClassification", "class", {}),
    ("videomae", "VideoMAEForVideoClassification", "class", {}),
    # sound and series
    ("wav2vec2", "Wav2Vec2ForCTC", "letters", {"reduction": "sum", "ways": KEPT}),
    ("wav2vec2", "Wav2Vec2ForCTC", "letters", {"config": {"ctc_loss_reduction": "mean"}}),
    ("wav2vec2", "Wav2Vec2ForSequenceClassification", "class", {"config": {"classifier_proj_size": 8}}),
    ("wav2vec2", "Wav2Vec2ForXVector", "class", {"config": {"tdnn_dim": [8] * 5, "xvector_output_dim": 8}}),
    ("wav2vec2", "Wav2Vec2ForAudioFrameClassification", "frames", {}),
    ("hubert", "HubertForCTC", "letters", {"reduction": "sum"}),
    ("wavlm", "WavLMForSequenceClassification", "class", {"config": {"classifier_proj_size": 8}}),
    ("sew", "SEWForCTC", "letters", {"reduction": "sum"}),
    ("data2vec-audio", "Data2VecAudioForCTC", "letters", {"reduction": "sum"}),
    ("whisper", "WhisperForConditionalGeneration", "target", {"ways": ADAPTED}),
    ("whisper", "WhisperForAudioClassification", "class", {"config": {"classifier_proj_size": 8}}),
    ("ast", "ASTForAudioClassification", "class", {}),
]
