"""Models of transformers with labels, as `Trainer` trains them: in training mode, by the loss that the model
itself returns.

A case is a model of `transformers_models` with a head: the same config and inputs, the head's class, and what
its labels are. Every rate of dropout is 0, BatchNorm is in eval mode, and all samples have as many labels, so
that a mean over labels is one over samples.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .case import EXACT, SINGLE, Inputs, _without_dropout, floats, ids
from .libraries import library
from .transformers_models import GROUPED, LATENT, MODELS, SPEECH, TEXT, VISION, pixels, wave
from .transformers_models import SINGLE as COMPUTE_IN_SINGLE
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
    "span": lambda n: {
        "start_positions": torch.randint(0, 4, (n,)),
        "end_positions": torch.randint(3, 5, (n,)),
    },
    "choice": lambda n: ids(n, 16, "input_ids") | _classes(n),
    "map": lambda n: _classes(n, 16, 16),
    "letters": lambda n: ids(n, 3, "labels"),
    "frames": lambda n: {"labels": nn.functional.one_hot(torch.randint(0, 2, (n, 15)), 2).double()},
}


@dataclass(frozen=True)
class TrainingCase:
    """A model and what it is trained with.

    `reduction`: what the model's loss is over samples. `ways`: how it is trained beside "plain": "checkpoint"
    (each layer's activations computed again), "reentrant" (the same by the old kind of checkpoint), "lora"
    (PEFT's adapters on all linear maps).
    """

    name: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[int], Inputs]
    labels: str
    reduction: str = "mean"
    single: bool = False  # whether a part of it computes in float32
    double: bool = True  # whether it runs in float64 at all
    ways: tuple[str, ...] = ("plain",)
    outputs: tuple[str, ...] = ()  # without labels: those that are each sample's own, () for all

    @property
    def tolerance(self) -> float:
        """How far a row may be from the loop's, relative to the parameter's largest value."""
        return SINGLE if self.single or not self.double else EXACT

    def make(self, way: str = "plain") -> nn.Module:
        """The model in training mode, every parameter moved off its initial value, with adapters where the
        way has them.
        """
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
        return (
            inputs
            if self.double
            else {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
        )

    def loss(self, output: Any, size: int) -> Tensor:
        """The loss of a batch of `size` samples: the model's own, or one made of its outputs."""
        if self.labels == "none":
            return losses([output[name] for name in self.outputs] if self.outputs else output, size).mean()
        loss: Tensor = output.loss
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
    ("modernbert", "ModernBertForMaskedLM", "tokens", {"single": True, "ways": KEPT}),
    ("modernbert", "ModernBertForSequenceClassification", "class", {}),
    # decoders of text
    ("gpt2", "GPT2LMHeadModel", "tokens", {"single": True, "ways": ADAPTED}),
    ("gpt2", "GPT2ForSequenceClassification", "class", {"config": {"pad_token_id": 0}}),
    ("gpt-neo", "GPTNeoForCausalLM", "tokens", {}),
    ("opt", "OPTForCausalLM", "tokens", {"single": True}),
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
    (
        "switch",
        "SwitchTransformersForConditionalGeneration",
        "target",
        {"config": {"router_jitter_noise": 0.0}},
    ),
    ("longt5", "LongT5ForConditionalGeneration", "target", {}),
    ("bart", "BartForConditionalGeneration", "target", {"ways": ADAPTED}),
    ("pegasus", "PegasusForConditionalGeneration", "target", {}),
    ("marian", "MarianMTModel", "target", {}),
    ("m2m100", "M2M100ForConditionalGeneration", "target", {}),
    ("led", "LEDForConditionalGeneration", "target", {}),
    ("prophetnet", "ProphetNetForConditionalGeneration", "target", {}),
    # images
    ("vit", "ViTForImageClassification", "class", {"ways": ADAPTED}),
    ("deit", "DeiTForImageClassification", "class", {}),
    ("beit", "BeitForImageClassification", "class", {"ways": KEPT}),
    ("data2vec-vision", "Data2VecVisionForImageClassification", "class", {}),
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
    ("wav2vec2", "Wav2Vec2ForCTC", "letters", {"single": True, "config": {"ctc_loss_reduction": "mean"}}),
    ("wav2vec2", "Wav2Vec2ForSequenceClassification", "class", {"config": {"classifier_proj_size": 8}}),
    (
        "wav2vec2",
        "Wav2Vec2ForXVector",
        "class",
        {
            "config": {"tdnn_dim": [8] * 5, "xvector_output_dim": 8},
            "inputs": partial(floats, input_values=(256,)),
        },
    ),
    ("wav2vec2", "Wav2Vec2ForAudioFrameClassification", "frames", {}),
    ("hubert", "HubertForCTC", "letters", {"reduction": "sum"}),
    ("wavlm", "WavLMForSequenceClassification", "class", {"config": {"classifier_proj_size": 8}}),
    ("sew", "SEWForCTC", "letters", {"single": True}),
    ("data2vec-audio", "Data2VecAudioForCTC", "letters", {"reduction": "sum"}),
    ("whisper", "WhisperForConditionalGeneration", "target", {"ways": ADAPTED}),
    ("whisper", "WhisperForAudioClassification", "class", {"config": {"classifier_proj_size": 8}}),
    ("ast", "ASTForAudioClassification", "class", {}),
]


def _case(base: str, head: str, labels: str, more: dict[str, Any]) -> TrainingCase:
    _, config, inputs = MODELS[base]
    more = {"single": base in COMPUTE_IN_SINGLE, **more}
    own, inputs = more.pop("config", {}), more.pop("inputs", inputs)
    name = "/".join((base, head, *(f"{k}={v}" for k, v in own.items() if isinstance(v, str))))
    return TrainingCase(name, head, {**config, **own}, inputs, labels, **more)


# models with experts as they come, by grouped products, which CPUs have in float32 alone
ROUTED = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
EXPERTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}, ADAPTED),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**ROUTED, "num_experts": 3, "shared_expert_intermediate_size": 8},
        KEPT,
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**ROUTED, "head_dim": 8, "num_experts": 3}, KEPT),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "first_k_dense_replace": 1}, ("plain",)),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "first_k_dense_replace": 1}, ("plain",)),
    "olmoe": ("OlmoeForCausalLM", {**ROUTED, "num_experts": 3}, ("plain", "lora")),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "num_local_experts": 3, "num_experts_per_tok": 2},
        KEPT,
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        ("plain",),
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2},
        ("plain",),
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
        },
        ("plain",),
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {**GROUPED, "num_local_experts": 3, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
        ("plain",),
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 32,
            "vocab_size": 50,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"moe_num_experts": 3, "moe_top_k": 2, "ffn_hidden_size": 8, "hidden_size": 16},
        },
        ("plain",),
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **GROUPED,
            "num_local_experts": 3,
            "head_dim": 8,
            "block_size": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        ("plain",),
    ),
}


def _expert_cases() -> list[TrainingCase]:
    found = []
    for base, (head, config, ways) in EXPERTS.items():
        for labels, each in (("tokens", ways), ("none", ("plain",))):
            name = f"{base}/{head}" + ("" if labels == "tokens" else "/none")
            found.append(TrainingCase(name, head, config, ids, labels, double=False, ways=each))
    return found


# vision beside language: pixels written where placeholders are, or features of both
IMAGE, PLACEHOLDERS = 49, 16


def _captions(n: int) -> Inputs:
    """Images, and texts with a placeholder for each of an image's patches."""
    tokens = ids(n, 4)["input_ids"] % 40 + 3
    return (
        pixels(n)
        | {"input_ids": torch.cat([torch.full((n, PLACEHOLDERS), IMAGE), tokens], 1)}
        | ids(n, PLACEHOLDERS + 4, "labels")
    )


def _grids(n: int) -> Inputs:
    """Images as packed patches, k rows a sample, and their grids."""
    tokens = torch.cat([torch.full((n, 4), IMAGE), ids(n, 4)["input_ids"] % 40 + 3], 1)
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * n),
        **floats(n * 16, pixel_values=(96,)),
        **ids(n, 8, "labels"),
    }


def _pairs(n: int) -> Inputs:
    return pixels(n) | ids(n)


def _kosmos(n: int) -> Inputs:
    where = (torch.arange(8) > 0) & (torch.arange(8) < 4)  # three of the tokens stand for the image
    return (
        _pairs(n) | {"image_embeds_position_mask": where.long().expand(n, 8).clone()} | ids(n, name="labels")
    )


CLIP_TEXT = {**TEXT, "eos_token_id": 2}
PAIR = {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 16}
QWEN_TEXT = {
    **GROUPED,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}
TOGETHER: list[TrainingCase] = [
    TrainingCase(
        "clip/CLIPModel", "CLIPModel", PAIR, _pairs, "none", outputs=("text_embeds", "image_embeds")
    ),
    TrainingCase("clip/CLIPForImageClassification", "CLIPForImageClassification", PAIR, pixels, "class"),
    TrainingCase(
        "siglip/SiglipModel", "SiglipModel", PAIR, _pairs, "none", outputs=("text_embeds", "image_embeds")
    ),
    TrainingCase(
        "owlvit/OwlViTForObjectDetection", "OwlViTForObjectDetection", PAIR, _pairs, "none", single=True
    ),
    TrainingCase(
        "kosmos-2/Kosmos2ForConditionalGeneration",
        "Kosmos2ForConditionalGeneration",
        {
            "text_config": {
                "vocab_size": 50,
                "max_position_embeddings": 32,
                "embed_dim": 16,
                "layers": 1,
                "ffn_dim": 24,
                "attention_heads": 2,
            },
            "vision_config": VISION,
            "latent_query_num": 3,
        },
        _kosmos,
        "none",
        double=False,
    ),
    TrainingCase(
        "qwen2-vl/Qwen2VLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": QWEN_TEXT,
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
                "mlp_ratio": 2,
            },
            "image_token_id": IMAGE,
            "video_token_id": 48,
            "vision_start_token_id": 47,
            "vision_end_token_id": 46,
        },
        _grids,
        "given",
        single=True,
        ways=KEPT,
    ),
    TrainingCase(
        "llava/LlavaForConditionalGeneration",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
        },
        _captions,
        "given",
        single=True,
        ways=KEPT,
    ),
    TrainingCase(
        "blip/BlipForConditionalGeneration",
        "BlipForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "encoder_hidden_size": 16,
                "bos_token_id": 1,
                "sep_token_id": 2,
                "label_smoothing": 0.0,
            },
            "vision_config": VISION,
        },
        lambda n: _pairs(n) | ids(n, name="labels"),
        "given",
    ),
]
OTHERS: list[TrainingCase] = [
    TrainingCase(
        "reformer/ReformerModelWithLMHead",
        "ReformerModelWithLMHead",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "attention_head_size": 8,
            "feed_forward_size": 24,
            "max_position_embeddings": 32,
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 2,
            "num_hashes": 1,
            "hash_seed": 0,
            "is_decoder": True,
        },
        ids,
        "tokens",
        single=True,
    ),
    TrainingCase(
        "wav2vec2-conformer/Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerForCTC",
        {**SPEECH, "conv_depthwise_kernel_size": 3},
        wave,
        "letters",
        reduction="sum",
        ways=KEPT,
    ),
    TrainingCase(
        "sew-d/SEWDForCTC",
        "SEWDForCTC",
        {**SPEECH, "squeeze_factor": 2, "max_position_embeddings": 32, "position_buckets": 8},
        wave,
        "letters",
        single=True,
    ),
    TrainingCase(
        "cpmant/CpmAntForCausalLM",
        "CpmAntForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "dim_head": 8,
            "dim_ff": 24,
            "prompt_types": 3,
            "prompt_length": 3,
            "segment_types": 3,
        },
        ids,
        "tokens",
        single=True,
    ),
    TrainingCase(
        "patchtst/PatchTSTForClassification",
        "PatchTSTForClassification",
        {**MODELS["patchtst"][1], "num_targets": 2, "use_cls_token": True},
        lambda n: MODELS["patchtst"][2](n) | _classes(n, name="target_values"),
        "given",
    ),
]
LABELS["given"] = lambda n: {}  # they are among the inputs
TRAINING: dict[str, TrainingCase] = {
    case.name: case for case in (*(_case(*each) for each in HEADS), *_expert_cases(), *TOGETHER, *OTHERS)
}
