"""Importing the public libraries: offline, and torchvision also without its compiled ops."""

import os
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

LIBRARIES = ("transformers", "timm", "torchvision")


def library(name: str) -> ModuleType:
    """A public library, imported such that nothing is downloaded."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if find_spec("torchvision"):  # the others import it where it is installed
            _import_torchvision()
        return import_module(name)


def _import_torchvision() -> None:
    """Import torchvision; where its compiled ops do not fit this torch, without them: its models are plain
    Python.
    """
    try:
        import_module("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        kept = {
            name: getattr(torch.library, name)
            for name in ("register_fake", "register_autograd", "register_kernel")
        }
        try:
            for name in kept:  # nothing can be registered for an op that is not there
                setattr(torch.library, name, _register_nothing)
            import_module("torchvision")
        finally:
            for name, function in kept.items():
                setattr(torch.library, name, function)


def _register_nothing(*args: Any, **kwargs: Any) -> Any:
    return lambda function: function
