"""Which module a number in compiled code means: held weakly."""

import itertools
import weakref

import torch
from torch import nn

from .. import torch_api

# a leaf without a meaning, to which zeros flow back
ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
modules: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_uses = itertools.count()


def number_of(module: nn.Module) -> int:
    """A new number for a module."""
    modules[number := next(_numbers)] = module
    return number


def use_number() -> int:
    """A number for each use of a weight: the compiler would merge two that look alike, and their rows would
    count once.
    """
    return next(_uses)


torch_api.mark_constant(use_number)
