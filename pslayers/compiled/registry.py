"""What compiled code calls: ops of our own, and which module a number in it means (held weakly)."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api

# a leaf without a meaning, to which zeros flow back
ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
modules: "weakref.WeakValueDictionary[str, nn.Module]" = weakref.WeakValueDictionary()
# the last numbers of each: a graph of a model that has been restored may still go backward
_earlier: "weakref.WeakKeyDictionary[nn.Module, list[str]]" = weakref.WeakKeyDictionary()
KEPT = 2
_numbers = itertools.count()
_uses = itertools.count()


_library = torch.library.Library("pslayers", "FRAGMENT")
# what an op does besides computing, a CUDA graph would not do again
_tags = [torch.Tag.pt2_compliant_tag, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)])]


def as_op(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an op, which the compiler leaves as it is; `fake` gives what it returns while traced.

    As ``torch.library.custom_op``, whose wrappers cost as much time as a small layer.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=_tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pslayers::{name}", fake, lib=_library)
        return function

    return register


def numbered(module: nn.Module) -> tuple[str, Tensor]:
    """A new number for a module; those of its last conversion but one are forgotten.

    In letters, for code that is traced: an int that differs between modules is taken for a size there. And as
    an input of that code, not a part of it: equal layers share it.
    """
    modules[number := str(next(_numbers))] = module
    earlier = _earlier.setdefault(module, [])
    earlier.append(number)
    if len(earlier) > KEPT:
        modules.pop(earlier.pop(0), None)
    return number, torch.tensor(int(number), device="cpu")


@torch_api.mark_constant
def use_number() -> int:
    """A number for each use of a weight: the compiler would merge two that look alike, and their rows would
    count once.
    """
    return next(_uses)
