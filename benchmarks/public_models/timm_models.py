"""Models of timm, one or more a family."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from .case import PublicModel, image
from .libraries import library

Options = dict[str, Any]


def _registered(model: str, options: Options) -> nn.Module:
    built: nn.Module = library("timm").create_model(model, pretrained=False, num_classes=3, **options)
    return built


def _of_class(where: str, options: Callable[[Any], Options]) -> nn.Module:
    """ "module:Class", smaller than any that has a registered name; the options may need what the module
    defines.
    """
    library("timm")
    module, cls = where.split(":")
    found = import_module(f"timm.models.{module}")
    built: nn.Module = getattr(found, cls)(num_classes=3, **options(found))
    return built


CHANNELS = {"channels": (16, 24, 32, 40)}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
TWINS = {"img_size": 64, "embed_dims": (8, 16, 32, 64), "num_heads": (2, 2, 2, 2)}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_blocks": 2}
CROSSVIT = {
    "img_size": 48,
    "img_scale": (1.0, 1.0),
    "patch_size": (8, 16),
    "embed_dim": (16, 32),
    "depth": ((1, 1, 0),),
    "num_heads": (2, 2),
    "mlp_ratio": (2, 2, 1),
    "multi_conv": False,
}
VOLO = {
    "img_size": 64,
    "layers": (1,) * 4,
    "embed_dims": (12, 24, 24, 24),
    "num_heads": (2,) * 4,
    "stem_hidden_dim": 8,
}
TINY_VIT = {
    "embed_dims": (8, 16, 24, 32),
    "depths": (1,) * 4,
    "num_heads": (1, 2, 2, 2),
    "window_sizes": (4, 4, 4, 2),
}
GHOSTNET = [[[3, 16, 16, 0, 1]], [[3, 48, 24, 0, 2]], [[3, 72, 24, 0.25, 1]], [[5, 72, 40, 0.25, 2]]]

# by registered name: the options, the image size
REGISTERED: dict[str, tuple[str, Options, int]] = {
    "resnet": ("resnet10t", CHANNELS, 32),
    "resnext": ("resnext26ts", {}, 32),
    "seresnet": ("seresnet18", CHANNELS, 32),
    "ecaresnet": ("ecaresnet26t", {"layers": (1, 1, 1, 1), **CHANNELS}, 32),
    "resnetv2": ("resnetv2_18", CHANNELS, 32),
    "densenet": ("densenet121", {"block_config": (2, 2), "growth_rate": 8}, 32),
    "efficientnet": ("efficientnet_b0", {}, 32),
    "mobilenetv2": ("mobilenetv2_050", {}, 32),
    "mobilenetv3": ("mobilenetv3_small_050", {}, 32),
    "mobilenetv4": ("mobilenetv4_conv_small_050", {}, 32),
    "mnasnet": ("mnasnet_small", {}, 32),
    "fbnetc": ("fbnetc_100", {}, 32),
    "lcnet": ("lcnet_050", {}, 32),
    "tinynet": ("tinynet_e", {}, 32),
    "mixnet": ("mixnet_s", {}, 32),
    "ghostnet": ("ghostnet_050", {}, 32),
    "regnetx": ("regnetx_002", {}, 32),
    "regnety": ("regnety_002", {}, 32),
    "convnext": ("convnext_atto", CONVNEXT, 32),
    "convnextv2": ("convnextv2_atto", CONVNEXT, 32),
    "vit": ("vit_tiny_patch16_224", VIT, 32),
    "vit-register": ("vit_small_patch14_reg4_dinov2", VIT, 32),
    "vit-gap": ("vit_base_patch16_siglip_gap_224", VIT, 32),
    "vit-map": ("vit_base_patch16_siglip_224", VIT, 32),
    "vit-relpos": ("vit_relpos_small_patch16_224", VIT, 32),
    "deit": ("deit_tiny_patch16_224", VIT, 32),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", VIT, 32),
    "deit3": ("deit3_small_patch16_224", VIT, 32),
    "beit": ("beit_base_patch16_224", VIT, 32),
    "eva02": ("eva02_tiny_patch14_224", VIT, 32),
    "cait": ("cait_xxs24_224", VIT, 32),
    "xcit": ("xcit_nano_12_p8_224", VIT, 32),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 32),
    "swinv2": ("swinv2_tiny_window8_256", SWIN, 32),
    "pvt_v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)}, 32),
    "coat": ("coat_lite_tiny", {"img_size": 32}, 32),
    "levit": ("levit_128s", {"img_size": 64}, 64),
    "dla": ("dla46_c", {}, 32),
    "hrnet": ("hrnet_w18_small", {}, 32),
    "edgenext": ("edgenext_xx_small", {}, 64),
    "mobilevit": ("mobilevit_xxs", {}, 64),
    "mobilevitv2": ("mobilevitv2_050", {}, 64),
    "fastvit": ("fastvit_t8", {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64)}, 64),
    "maxvit": ("maxvit_rmlp_pico_rw_256", {"img_size": 64}, 64),
    "coatnet": ("coatnet_pico_rw_224", {"img_size": 32}, 32),
    "twins-svt": ("twins_svt_small", {**TWINS, "depths": (2, 2, 2, 2)}, 64),
    "twins-pcpvt": ("twins_pcpvt_small", {**TWINS, "depths": (1, 1, 1, 1)}, 64),
    "visformer": (
        "visformer_tiny",
        {"img_size": 32, "embed_dim": 48, "depth": (1, 1, 1), "num_heads": 3},
        32,
    ),
    "tnt": (
        "tnt_s_legacy_patch16_224",
        {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads_outer": 2},
        32,
    ),
    "convit": (
        "convit_tiny",
        {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "local_up_to_layer": 1},
        32,
    ),
    "pit": ("pit_ti_224", {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1)}, 64),
    "repvgg": ("repvgg_a0", {}, 32),
    "mobileone": ("mobileone_s0", {}, 32),
    "rexnet": ("rexnet_100", {}, 32),
    "sknet": ("skresnet18", CHANNELS, 32),
    "res2net": ("res2net50_14w_8s", {"layers": (1, 1, 1, 1)}, 32),
    "resnest": ("resnest14d", CHANNELS, 32),
    "cspnet": ("cs3darknet_s", {}, 32),
    "hardcorenas": ("hardcorenas_a", {}, 32),
    "davit": (
        "davit_tiny",
        {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (1, 2, 4, 8)},
        64,
    ),
    "efficientvit": ("efficientvit_b0", {}, 64),
    "sequencer": (
        "sequencer2d_s",
        {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "hidden_sizes": (4, 8, 8, 8)},
        56,
    ),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 8, "stages": (1, 1, 1, 1)}, 64),
    "starnet": ("starnet_s050", {}, 32),
    "inception_next": ("inception_next_atto", {}, 32),
    "mambaout": ("mambaout_femto", CONVNEXT, 32),
    "hgnet": ("hgnetv2_b0", {}, 32),
    "vovnet": ("ese_vovnet19b_slim_dw", {}, 32),
    "lambdanet": ("lambda_resnet26t", {"img_size": 64}, 64),
    "botnet": ("botnet26t_256", {"img_size": 64}, 64),
}

# by class: the options, a function of the module that defines the class; the image size
CLASSES: dict[str, tuple[str, Callable[[Any], Options], int]] = {
    "mixer": ("mlp_mixer:MlpMixer", lambda m: MIXER, 32),
    "gmixer": ("mlp_mixer:MlpMixer", lambda m: {**MIXER, "mlp_layer": m.GluMlp, "mlp_ratio": (1.0, 4.0)}, 32),
    "resmlp": (
        "mlp_mixer:MlpMixer",
        lambda m: {**MIXER, "mlp_ratio": 4, "block_layer": m.ResBlock, "norm_layer": m.Affine},
        32,
    ),
    "gmlp": (
        "mlp_mixer:MlpMixer",
        lambda m: {**MIXER, "mlp_ratio": 4, "block_layer": m.SpatialGatingBlock, "mlp_layer": m.GatedMlp},
        32,
    ),
    "poolformer": ("metaformer:MetaFormer", lambda m: CONVNEXT, 32),
    "poolformerv2": (
        "metaformer:MetaFormer",
        lambda m: {**CONVNEXT, "mlp_act": m.StarReLU, "use_mlp_head": False},
        32,
    ),
    "crossvit": ("crossvit:CrossVit", lambda m: CROSSVIT, 48),
    "nfnet": (
        "nfnet:NormFreeNet",
        lambda m: {
            "cfg": m.NfCfg((1, 1, 1, 1), (16, 24, 32, 40), stem_chs=16, skipinit=True, num_features=48)
        },
        32,
    ),
    "vgg": (
        "vgg:VGG",
        lambda m: {"cfg": [8, "M", 16, "M", 24, "M", 32, "M", 32, "M"], "mlp_ratio": 0.01},
        32,
    ),
    "focalnet": (
        "focalnet:FocalNet",
        lambda m: {"depths": (1, 1, 1, 1), "embed_dim": 8, "layerscale_value": 1e-4},
        32,
    ),
    "volo": ("volo:VOLO", lambda m: VOLO, 64),
    "nest": (
        "nest:Nest",
        lambda m: {
            "img_size": 32,
            "num_levels": 2,
            "embed_dims": (8, 16),
            "num_heads": (1, 2),
            "depths": (1, 1),
        },
        32,
    ),
    "convmixer": ("convmixer:ConvMixer", lambda m: {"dim": 24, "depth": 2}, 32),
    "repvit": ("repvit:RepVit", lambda m: {"embed_dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)}, 32),
    "mvitv2": (
        "mvitv2:MultiScaleVit",
        lambda m: {
            "img_size": 32,
            "cfg": m.MultiScaleVitCfg(depths=(1, 1), embed_dim=(8, 16), num_heads=(1, 2)),
        },
        32,
    ),
    "tiny_vit": ("tiny_vit:TinyVit", lambda m: TINY_VIT, 64),
    "ghostnetv2": ("ghostnet:GhostNet", lambda m: {"cfgs": GHOSTNET, "version": "v2"}, 64),
}

SINGLE = {"efficientvit": "its linear attention divides in float32"}
# torch's own gradient of BatchNorm in eval mode is wrong in these for a batch of one, see
# `tests/public_models`
WRONG_AT_ONE = frozenset({"xcit", "lambdanet", "levit"})
ONCE = dict.fromkeys(("levit", "tiny_vit"), "in eval mode it keeps the graph of its attention biases")


def _case(name: str, build: Callable[[], nn.Module], size: int) -> PublicModel:
    copies = 2 if name in WRONG_AT_ONE else 1
    inputs = partial(image, size=size, name="x")
    return PublicModel(
        f"timm/{name}", build, inputs, SINGLE.get(name, ""), copies=copies, once=ONCE.get(name, "")
    )


TIMM = [
    *(
        _case(name, partial(_registered, model, options), size)
        for name, (model, options, size) in REGISTERED.items()
    ),
    *(
        _case(name, partial(_of_class, where, options), size)
        for name, (where, options, size) in CLASSES.items()
    ),
]
