"""What a module holds, as torch keeps it: a user's class may give the names `parameters`, `modules` and so on
to something else (those that an agent trains, a list of settings).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def named_modules(module: nn.Module, shared: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of a module and of all that is below it, each once, the outer ones first; `shared`: by
    all of its paths.
    """
    known: set[int] = set()
    todo: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", module, ())]
    while todo:
        path, module, above = todo.pop()
        if id(module) not in (above if shared else known):
            known.add(id(module))
            yield path, module
            before, above = path and f"{path}.", (*above, id(module))
            below = [(f"{before}{name}", m, above) for name, m in module._modules.items() if m is not None]
            todo += reversed(below)


def modules(module: nn.Module) -> Iterator[nn.Module]:
    """The same without the paths."""
    return (part for _, part in named_modules(module))


def named_parameters(module: nn.Module, shared: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that is in a module, each once; `shared`: by all of its names."""
    known: set[int] = set()
    for path, part in named_modules(module, shared):
        before = path and f"{path}."
        for name, param in part._parameters.items():
            if param is not None and (shared or id(param) not in known):
                known.add(id(param))
                yield f"{before}{name}", param


def parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The same without the names."""
    return (param for _, param in named_parameters(module))


def buffers(module: nn.Module) -> Iterator[Tensor]:
    """All buffers in a module; shared ones as often as they are held."""
    return (t for part in modules(module) for t in part._buffers.values() if t is not None)


def submodule(module: nn.Module, path: str) -> nn.Module:
    """That which lies there below a module."""
    for name in path.split(".") if path else ():
        below = module._modules[name]
        assert below is not None
        module = below
    return module


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of a module's own: its direct ones, and those of children that are never called
    (ParameterList).
    """
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module._modules.items():
        if child is not None and not callable_module(child):
            yield from ((f"{name}.{inner}", p) for inner, p in own_parameters(child))


def trainable_parameters(module: nn.Module, own: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters of the module and of all that is below it, shared ones once; with `own`, those
    of the module alone.
    """
    found = own_parameters(module) if own else named_parameters(module)
    return {name: p for name, p in found if p.requires_grad}


def callable_module(module: nn.Module) -> bool:
    """Whether the module has a forward: lists and dicts of modules or parameters have none."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
