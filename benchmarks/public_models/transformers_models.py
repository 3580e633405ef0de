"""Models of transformers, one or more a model type."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .case import Inputs, PublicModel, floats, ids, image
from .libraries import library


def _build(model: str, config: dict[str, Any]) -> nn.Module:
    transformers: Any = library("transformers")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, model)
    built: nn.Module = cls(cls.config_class(**config))
    return built


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 50, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}
SEQ2SEQ = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
SPEECH = {
    **TEXT,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [6, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
wave = partial(floats, input_values=(128,))
pixels = partial(image, size=16)
pair = partial(ids, decoder_input_ids=5)

MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int], Inputs]]] = {
    # encoders of text
    "bert": ("BertModel", TEXT, ids),
    "roberta": ("RobertaModel", TEXT, ids),
    "distilbert": ("DistilBertModel", {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}, ids),
    "albert": ("AlbertModel", {**TEXT, "embedding_size": 8}, ids),
    "electra": ("ElectraModel", {**TEXT, "embedding_size": 8}, ids),
    "xlm-roberta": ("XLMRobertaModel", TEXT, ids),
    "deberta": ("DebertaModel", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, ids),
    "deberta-v2": ("DebertaV2Model", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, ids),
    "mpnet": ("MPNetModel", TEXT, ids),
    "mobilebert": (
        "MobileBertModel",
        {**TEXT, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
        ids,
    ),
    "squeezebert": ("SqueezeBertModel", {**TEXT, "embedding_size": 16, **{f"{k}_groups": 2 for k in "qkv"}}, ids),
    "convbert": ("ConvBertModel", {**TEXT, "embedding_size": 8, "conv_kernel_size": 3}, ids),
    "fnet": ("FNetModel", TEXT, ids),
    "roformer": ("RoFormerModel", {**TEXT, "embedding_size": 16}, ids),
    "longformer": ("LongformerModel", {**TEXT, "attention_window": 4}, ids),
    "bigbird": ("BigBirdModel", {**TEXT, "attention_type": "original_full"}, ids),
    "funnel": (
        "FunnelModel",
        {"vocab_size": 50, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
        ids,
    ),
    "xlnet": ("XLNetModel", {"vocab_size": 50, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, ids),
    "xlm": ("XLMModel", {"vocab_size": 50, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}, ids),
    "canine": (
        "CanineModel",
        {**TEXT, "max_position_embeddings": 64, "num_hash_buckets": 64, "local_transformer_stride": 8},
        partial(ids, length=32),
    ),
    "esm": ("EsmModel", {**TEXT, "pad_token_id": 1, "position_embedding_type": "rotary"}, ids),
    "modernbert": ("ModernBertModel", {**TEXT, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4}, ids),
    # decoders of text
    "gpt2": ("GPT2Model", {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, ids),
    "openai-gpt": ("OpenAIGPTModel", {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, ids),
    "ctrl": ("CTRLModel", {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "n_positions": 32}, ids),
    "gpt-neo": (
        "GPTNeoModel",
        {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
        ids,
    ),
    "gpt-j": (
        "GPTJModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 32},
        ids,
    ),
    "gpt-neox": ("GPTNeoXModel", TEXT, ids),
    "gpt-bigcode": ("GPTBigCodeModel", {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, ids),
    "opt": (
        "OPTModel",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
        ids,
    ),
    "bloom": ("BloomModel", {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2}, ids),
    "falcon": ("FalconModel", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}, ids),
    "mpt": ("MptModel", {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}, ids),
    "llama": ("LlamaModel", GROUPED, ids),
    "llama-lm": ("LlamaForCausalLM", GROUPED, ids),
    "mistral": ("MistralModel", GROUPED, ids),
    "qwen2": ("Qwen2Model", GROUPED, ids),
    "qwen3": ("Qwen3Model", {**GROUPED, "head_dim": 8}, ids),
    "gemma": ("GemmaModel", {**GROUPED, "head_dim": 8}, ids),
    "gemma2": ("Gemma2Model", {**GROUPED, "head_dim": 8}, ids),
    "phi": ("PhiModel", TEXT, ids),
    "phi3": ("Phi3Model", GROUPED, ids),
    "olmo2": ("Olmo2Model", GROUPED, ids),
    "stablelm": ("StableLmModel", GROUPED, ids),
    "starcoder2": ("Starcoder2Model", GROUPED, ids),
    "cohere": ("CohereModel", GROUPED, ids),
    "granite": ("GraniteModel", GROUPED, ids),
    "mixtral": ("MixtralModel", {**GROUPED, "num_local_experts": 3, "experts_implementation": "eager"}, ids),
    "qwen2-moe": (
        "Qwen2MoeModel",
        {
            **GROUPED,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "experts_implementation": "eager",
        },
        ids,
    ),
    "mamba": ("MambaModel", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, ids),
    "mamba2": (
        "Mamba2Model",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        ids,
    ),
    # encoders with decoders
    "t5-encoder": ("T5EncoderModel", T5, ids),
    "t5": ("T5Model", T5, pair),
    "mt5": ("MT5Model", T5, pair),
    "switch": ("SwitchTransformersModel", {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1}, pair),
    "bart": ("BartModel", SEQ2SEQ, pair),
    "pegasus": ("PegasusModel", SEQ2SEQ, pair),
    "marian": ("MarianModel", SEQ2SEQ, pair),
    "whisper": (
        "WhisperModel",
        {**SEQ2SEQ, "vocab_size": 60, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16},
        lambda n: floats(n, input_features=(4, 16)) | ids(n, 5, "decoder_input_ids"),
    ),
    # images
    "vit": ("ViTModel", VISION, pixels),
    "deit": ("DeiTModel", VISION, pixels),
    "beit": ("BeitModel", {**VISION, "use_mask_token": False, "use_relative_position_bias": True}, pixels),
    "dinov2": ("Dinov2Model", VISION, pixels),
    "vit-msn": ("ViTMSNModel", VISION, pixels),
    "swin": (
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
        pixels,
    ),
    "swinv2": (
        "Swinv2Model",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
        pixels,
    ),
    "convnext": ("ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}, pixels),
    "convnextv2": ("ConvNextV2Model", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}, pixels),
    "segformer": (
        "SegformerModel",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
        },
        pixels,
    ),
    "poolformer": (
        "PoolFormerModel",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
        },
        pixels,
    ),
    "resnet": ("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, pixels),
    "mobilevit": (
        "MobileViTModel",
        {
            "image_size": 32,
            "patch_size": 2,
            "hidden_sizes": [8, 12, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
        },
        image,
    ),
    "focalnet": (
        "FocalNetModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        pixels,
    ),
    "siglip-vision": ("SiglipVisionModel", VISION, pixels),
    "clip-vision": ("CLIPVisionModel", VISION, pixels),
    "clip-text": ("CLIPTextModel", {**TEXT, "eos_token_id": 1}, ids),
    "videomae": (
        "VideoMAEModel",
        {**VISION, "num_frames": 4, "tubelet_size": 2},
        lambda n: floats(n, pixel_values=(4, 3, 16, 16)),
    ),
    # sound and series
    "wav2vec2": ("Wav2Vec2Model", SPEECH, wave),
    "hubert": ("HubertModel", SPEECH, wave),
    "wavlm": ("WavLMModel", SPEECH, wave),
    "ast": (
        "ASTModel",
        {**SIZES, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        lambda n: floats(n, input_values=(16, 8)),
    ),
    "patchtst": (
        "PatchTSTModel",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "ffn_dim": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        },
        lambda n: floats(n, past_values=(16, 2)),
    ),
}


# what these compute in float32, whatever their weights are
SINGLE = {
    **dict.fromkeys(("cohere", "gemma", "gemma2", "granite", "llama", "llama-lm", "mistral", "mixtral"), "its norms"),
    **dict.fromkeys(("mt5", "olmo2", "phi3", "qwen2", "qwen2-moe", "qwen3", "switch", "t5", "t5-encoder"), "its norms"),
    **dict.fromkeys(("funnel", "gpt-j", "gpt-neo", "longformer", "xlm"), "its attention scores"),
    **dict.fromkeys(("mamba", "mamba2"), "its norms and its scan"),
    "canine": "all of it: its mask is not finite in float64",
    "deberta": "its norms",
    "esm": "its rotary embedding",
}

TRANSFORMERS = [
    PublicModel(f"transformers/{name}", partial(_build, model, config), inputs, SINGLE.get(name, ""), double=name != "canine")
    for name, (model, config, inputs) in MODELS.items()
]
