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
LATENT = {
    **TEXT,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "experts_implementation": "eager"}
PROPHET = {
    "vocab_size": 50,
    "hidden_size": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 2,
}
VITDET = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "pretrain_image_size": 16,
    "patch_size": 4,
    "window_block_indices": [0],
    "window_size": 2,
    "use_relative_position_embeddings": True,
}
HIERA = {
    "image_size": [32, 32],
    "patch_size": [3, 3],
    "patch_stride": [2, 2],
    "patch_padding": [1, 1],
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "query_stride": [2, 2],
    "masked_unit_size": [2, 2],
    "num_query_pool": 1,
}
PVT = {
    "image_size": 32,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_encoder_blocks": 2,
    "num_attention_heads": [1, 2],
    "sequence_reduction_ratios": [2, 1],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}
LEVIT = {
    "image_size": 32,
    "hidden_sizes": [16] * 3,
    "num_attention_heads": [2] * 3,
    "depths": [1] * 3,
    "key_dim": [4] * 3,
    "mlp_ratio": [2] * 3,
    "attention_ratio": [2] * 3,
}
video = partial(floats, pixel_values=(4, 3, 16, 16))
wave = partial(floats, input_values=(128,))
pixels = partial(image, size=16)
pair = partial(ids, decoder_input_ids=5)

MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int], Inputs]]] = {
    # encoders of text
    "bert": ("BertModel", TEXT, ids),
    "roberta": ("RobertaModel", TEXT, ids),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        ids,
    ),
    "albert": ("AlbertModel", {**TEXT, "embedding_size": 8}, ids),
    "electra": ("ElectraModel", {**TEXT, "embedding_size": 8}, ids),
    "xlm-roberta": ("XLMRobertaModel", TEXT, ids),
    "deberta": ("DebertaModel", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, ids),
    "deberta-v2": (
        "DebertaV2Model",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        ids,
    ),
    "mpnet": ("MPNetModel", TEXT, ids),
    "mobilebert": (
        "MobileBertModel",
        {**TEXT, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
        ids,
    ),
    "squeezebert": (
        "SqueezeBertModel",
        {**TEXT, "embedding_size": 16, **{f"{k}_groups": 2 for k in "qkv"}},
        ids,
    ),
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
    "xlm": (
        "XLMModel",
        {"vocab_size": 50, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32},
        ids,
    ),
    "canine": (
        "CanineModel",
        {**TEXT, "max_position_embeddings": 64, "num_hash_buckets": 64, "local_transformer_stride": 8},
        partial(ids, length=32),
    ),
    "esm": ("EsmModel", {**TEXT, "pad_token_id": 1, "position_embedding_type": "rotary"}, ids),
    "modernbert": (
        "ModernBertModel",
        {**TEXT, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4},
        ids,
    ),
    # decoders of text
    "gpt2": (
        "GPT2Model",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        ids,
    ),
    "openai-gpt": (
        "OpenAIGPTModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        ids,
    ),
    "ctrl": (
        "CTRLModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "n_positions": 32},
        ids,
    ),
    "gpt-neo": (
        "GPTNeoModel",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
        },
        ids,
    ),
    "gpt-j": (
        "GPTJModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 32},
        ids,
    ),
    "gpt-neox": ("GPTNeoXModel", TEXT, ids),
    "gpt-bigcode": (
        "GPTBigCodeModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        ids,
    ),
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
    "falcon": (
        "FalconModel",
        {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        ids,
    ),
    "mpt": (
        "MptModel",
        {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
        ids,
    ),
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
    "mamba": (
        "MambaModel",
        {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        ids,
    ),
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
    "gpt-oss": (
        "GptOssModel",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "num_local_experts": 3, **EXPERTS},
        ids,
    ),
    "deepseek-v3": (
        "DeepseekV3Model",
        {
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        ids,
    ),
    "olmoe": ("OlmoeModel", {**GROUPED, "num_experts": 3, **EXPERTS}, ids),
    "jetmoe": (
        "JetMoeModel",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
        },
        ids,
    ),
    "granite-moe": ("GraniteMoeModel", {**GROUPED, "num_local_experts": 3, **EXPERTS}, ids),
    "qwen3-next": (
        "Qwen3NextModel",
        {
            **GROUPED,
            "head_dim": 8,
            "num_experts": 3,
            **EXPERTS,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        ids,
    ),
    "falcon-mamba": (
        "FalconMambaModel",
        {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        ids,
    ),
    "recurrent-gemma": (
        "RecurrentGemmaModel",
        {**GROUPED, "head_dim": 8, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4},
        ids,
    ),
    "lfm2": ("Lfm2Model", {**GROUPED, "layer_types": ["conv", "full_attention"]}, ids),
    "doge": ("DogeModel", GROUPED, ids),
    "gpt-neox-japanese": ("GPTNeoXJapaneseModel", TEXT, ids),
    "minicpm3": ("MiniCPM3Model", LATENT, ids),
    "diffllama": ("DiffLlamaModel", {**GROUPED, "num_key_value_heads": 2}, ids),
    "imagegpt": (
        "ImageGPTModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        ids,
    ),
    "biogpt": ("BioGptModel", TEXT, ids),
    "codegen": (
        "CodeGenModel",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32},
        ids,
    ),
    "ibert": ("IBertModel", TEXT, ids),
    "luke": ("LukeModel", {**TEXT, "entity_vocab_size": 20, "entity_emb_size": 8}, ids),
    "layoutlm": ("LayoutLMModel", TEXT, ids),
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
        {
            **SEQ2SEQ,
            "vocab_size": 60,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        lambda n: floats(n, input_features=(4, 16)) | ids(n, 5, "decoder_input_ids"),
    ),
    "fsmt": (
        "FSMTModel",
        {**SEQ2SEQ, "src_vocab_size": 50, "tgt_vocab_size": 50, "langs": ["en", "de"]},
        pair,
    ),
    "prophetnet": ("ProphetNetModel", PROPHET, pair),
    "longt5": ("LongT5Model", {**T5, "local_radius": 3, "encoder_attention_type": "local"}, pair),
    "longt5-global": (
        "LongT5Model",
        {**T5, "local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"},
        pair,
    ),
    "led": (
        "LEDModel",
        {
            **SEQ2SEQ,
            "attention_window": 4,
            "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32,
        },
        pair,
    ),
    "m2m100": ("M2M100Model", SEQ2SEQ, pair),
    "mbart": ("MBartModel", SEQ2SEQ, pair),
    "bigbird-pegasus": ("BigBirdPegasusModel", {**SEQ2SEQ, "attention_type": "original_full"}, pair),
    "umt5": ("UMT5Model", T5, pair),
    "nllb-moe": (
        "NllbMoeModel",
        {
            **SEQ2SEQ,
            "num_experts": 3,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "expert_capacity": 64,
        },
        pair,
    ),
    # images
    "vit": ("ViTModel", VISION, pixels),
    "deit": ("DeiTModel", VISION, pixels),
    "beit": ("BeitModel", {**VISION, "use_mask_token": False, "use_relative_position_bias": True}, pixels),
    "dinov2": ("Dinov2Model", VISION, pixels),
    "vit-msn": ("ViTMSNModel", VISION, pixels),
    "swin": (
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        pixels,
    ),
    "swinv2": (
        "Swinv2Model",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        pixels,
    ),
    "convnext": (
        "ConvNextModel",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        pixels,
    ),
    "convnextv2": (
        "ConvNextV2Model",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        pixels,
    ),
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
    "data2vec-vision": ("Data2VecVisionModel", {**VISION, "use_relative_position_bias": True}, pixels),
    "dpt": (
        "DPTModel",
        {**VISION, "backbone_out_indices": [0, 1], "is_hybrid": False, "neck_hidden_sizes": [8, 8]},
        pixels,
    ),
    "vitdet": ("VitDetModel", VITDET, pixels),
    "sam-vision": (
        "SamVisionModel",
        {
            **VISION,
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
            "num_pos_feats": 4,
        },
        pixels,
    ),
    "hiera": ("HieraModel", HIERA, image),
    "pvt": ("PvtModel", PVT, image),
    "mobilenet-v1": ("MobileNetV1Model", {"depth_multiplier": 0.25, "min_depth": 4}, image),
    "levit": ("LevitModel", LEVIT, image),
    "vivit": ("VivitModel", {**SIZES, "image_size": 16, "num_frames": 4, "tubelet_size": [2, 4, 4]}, video),
    "timesformer": ("TimesformerModel", {**SIZES, "image_size": 16, "patch_size": 4, "num_frames": 4}, video),
    # sound and series
    "wav2vec2": ("Wav2Vec2Model", SPEECH, wave),
    "hubert": ("HubertModel", SPEECH, wave),
    "wavlm": ("WavLMModel", SPEECH, wave),
    "ast": (
        "ASTModel",
        {
            **SIZES,
            "patch_size": 4,
            "max_length": 16,
            "num_mel_bins": 8,
            "frequency_stride": 4,
            "time_stride": 4,
        },
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
    "parakeet": (
        "ParakeetEncoder",
        {
            **SIZES,
            "num_mel_bins": 8,
            "subsampling_conv_channels": 8,
            "max_position_embeddings": 64,
            "conv_kernel_size": 3,
        },
        partial(floats, input_features=(32, 8)),
    ),
    "sew": ("SEWModel", {**SPEECH, "squeeze_factor": 2}, wave),
    "unispeech": ("UniSpeechModel", SPEECH, wave),
    "data2vec-audio": ("Data2VecAudioModel", {**SPEECH, "conv_pos_kernel_size": 3}, wave),
    "patchtsmixer": (
        "PatchTSMixerModel",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 8,
            "num_layers": 2,
        },
        partial(floats, past_values=(16, 2)),
    ),
}


# what these compute in float32, whatever their weights are
NORMS = (
    "cohere deepseek-v3 diffllama doge gemma gemma2 gpt-oss granite granite-moe jetmoe lfm2 llama llama-lm"
    " longt5 longt5-global"
)
MORE_NORMS = (
    "minicpm3 mistral mixtral mt5 nllb-moe olmo2 olmoe phi3 qwen2 qwen2-moe qwen3 switch t5 t5-encoder umt5"
)
SINGLE = {
    **dict.fromkeys((*NORMS.split(), *MORE_NORMS.split()), "its norms, or its router"),
    **dict.fromkeys(
        ("funnel", "gpt-j", "gpt-neo", "led", "longformer", "prophetnet", "xlm"), "its attention scores"
    ),
    **dict.fromkeys(
        ("falcon-mamba", "mamba", "mamba2", "qwen3-next", "recurrent-gemma"), "its norms and its scan"
    ),
    "canine": "all of it: its mask is not finite in float64",
    "deberta": "its norms",
    "esm": "its rotary embedding",
}
# torch's own gradient of BatchNorm in eval mode is wrong in these for a batch of one, see
# `tests/public_models`
WRONG_AT_ONE = frozenset({"levit"})
ONCE = {"levit": "in eval mode it keeps the graph of its attention biases"}


def _case(name: str, model: str, config: dict[str, Any], inputs: Callable[[int], Inputs]) -> PublicModel:
    return PublicModel(
        f"transformers/{name}",
        partial(_build, model, config),
        inputs,
        SINGLE.get(name, ""),
        double=name != "canine",
        copies=2 if name in WRONG_AT_ONE else 1,
        once=ONCE.get(name, ""),
    )


TRANSFORMERS = [_case(name, *each) for name, each in MODELS.items()]
