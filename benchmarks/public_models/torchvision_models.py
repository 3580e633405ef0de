"""Models of torchvision, one or more a family."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from .case import Inputs, PublicModel, floats, image
from .libraries import library

Options = dict[str, Any]


def _registered(model: str, options: Options) -> nn.Module:
    library("torchvision")
    built: nn.Module = import_module("torchvision.models").get_model(
        model, weights=None, **{"num_classes": 3, **options}
    )
    return built


def _of_class(where: str, options: Callable[[Any], Options]) -> nn.Module:
    """ "module:Class", smaller than any that has a registered name; the options may need what the module
    defines.
    """
    library("torchvision")
    module, cls = where.split(":")
    found = import_module(f"torchvision.models.{module}")
    built: nn.Module = getattr(found, cls)(num_classes=3, **options(found))
    return built


def _narrow_head(build: Callable[[], nn.Module]) -> nn.Module:
    """AlexNet and VGG with a head of thousands, not of a hundred million, of weights."""
    model: Any = build()
    features = next(m.in_features for m in model.classifier if isinstance(m, nn.Linear))
    model.classifier = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 3))
    built: nn.Module = model
    return built


def _video(n: int, size: int, name: str) -> Inputs:
    return floats(n, **{name: (3, 4, size, size)})


VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 24, "mlp_dim": 32}
SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
MAXVIT = {
    "input_size": (32, 32),
    "stem_channels": 8,
    "partition_size": 4,
    "block_channels": [8, 16],
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}
SEGMENTATION = {"weights_backbone": None}

# by registered name: the options, the image size
REGISTERED: dict[str, tuple[str, Options, int]] = {
    "alexnet": ("alexnet", {}, 64),
    "vgg": ("vgg11_bn", {}, 32),
    "resnet": ("resnet18", {}, 32),
    "squeezenet": ("squeezenet1_1", {}, 32),
    "googlenet": ("googlenet", {"aux_logits": False, "init_weights": False}, 32),
    "mobilenet_v2": ("mobilenet_v2", {"width_mult": 0.35}, 32),
    "mobilenet_v3": ("mobilenet_v3_small", {}, 32),
    "shufflenet_v2": ("shufflenet_v2_x0_5", {}, 32),
    "mnasnet": ("mnasnet0_5", {}, 32),
    "efficientnet": ("efficientnet_b0", {}, 32),
    "regnet": ("regnet_y_400mf", {}, 32),
    "deeplabv3": ("deeplabv3_mobilenet_v3_large", SEGMENTATION, 32),
    "lraspp": ("lraspp_mobilenet_v3_large", SEGMENTATION, 32),
    "r3d": ("r3d_18", {}, 16),
}

# by class: the options, a function of the module that defines the class; the image size
CLASSES: dict[str, tuple[str, Callable[[Any], Options], int]] = {
    "resnext": (
        "resnet:ResNet",
        lambda m: {"block": m.Bottleneck, "layers": [1, 1, 1, 1], "groups": 8, "width_per_group": 4},
        32,
    ),
    "densenet": ("densenet:DenseNet", lambda m: {"block_config": (2, 2), "growth_rate": 8}, 32),
    "convnext": (
        "convnext:ConvNeXt",
        lambda m: {"block_setting": [m.CNBlockConfig(8, 16, 1), m.CNBlockConfig(16, None, 1)]},
        32,
    ),
    "vit": ("vision_transformer:VisionTransformer", lambda m: VIT, 32),
    "swin": ("swin_transformer:SwinTransformer", lambda m: SWIN, 32),
    "swin_v2": (
        "swin_transformer:SwinTransformer",
        lambda m: {**SWIN, "block": m.SwinTransformerBlockV2, "downsample_layer": m.PatchMergingV2},
        32,
    ),
    "maxvit": ("maxvit:MaxVit", lambda m: MAXVIT, 32),
}


def _case(name: str, build: Callable[[], nn.Module], size: int) -> PublicModel:
    if name in ("alexnet", "vgg"):
        build = partial(_narrow_head, build)
    inputs = _video if name == "r3d" else image
    return PublicModel(
        f"torchvision/{name}", build, partial(inputs, size=size, name="input" if name == "lraspp" else "x")
    )


TORCHVISION = [
    *(
        _case(name, partial(_registered, model, options), size)
        for name, (model, options, size) in REGISTERED.items()
    ),
    *(
        _case(name, partial(_of_class, where, options), size)
        for name, (where, options, size) in CLASSES.items()
    ),
]
