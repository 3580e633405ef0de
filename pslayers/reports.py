"""report: how each module of a converted model is handled."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .core import contents
from .core.contents import callable_module, trainable_parameters
from .core.sharding import is_sharded
from .modules.base import PSLayer
from .modules.container import PSContainer
from .modules.converted import Converted


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before conversion."""
    base = cls.__bases__[0]
    if is_sharded(cls):
        before = original_class(cls.__bases__[1])
        if before is cls.__bases__[1]:
            return cls
        return type(f"FSDP{before.__name__}", (base, before), {"__deepcopy__": vars(cls)["__deepcopy__"]})
    # parametrised after conversion
    if cls.__name__ == f"Parametrized{base.__name__}" and issubclass(base, Converted):
        original, own = original_class(base), {k: v for k, v in vars(cls).items() if k != "__dict__"}
        return type(f"Parametrized{original.__name__}", (original,), own)
    if issubclass(cls, PSContainer):
        return cls._ps_original
    return cls.replaces or cls if issubclass(cls, PSLayer) else cls


@dataclass(frozen=True)
class Row:
    """How one module is handled; `target` is the class that it is given, None where it keeps its own."""

    path: str
    module: nn.Module
    original: type[nn.Module]
    target: type[nn.Module] | None
    general: bool = False
    way: str = ""  # how a general module is run, once that is known
    slow: frozenset[int] = frozenset()  # ids of parameters that are not on fast ops

    @property
    def recorded(self) -> bool:
        """Whether the module's own parameters get per-sample gradients."""
        return (
            self.general or bool(self.way) or (self.target is not None and issubclass(self.target, PSLayer))
        )

    @property
    def handled(self) -> str:
        """The replacement's name; how it is run without one ("direct", "vmap", "loop", by itself or with a
        container of it); "skipped" (trainable parameters without rows); or "container" of other modules.
        """
        if self.general or self.way:
            return self.way or "general, at the first call"
        if self.recorded and self.target is not None:
            return self.target.__name__
        return "skipped" if self.trainable else "container"

    @property
    def fast(self) -> list[nn.Parameter]:
        """The module's own trainable parameters whose ops are as fast as plain training."""
        return [p for p in self.trainable if id(p) not in self.slow] if self.recorded else []

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The module's own parameters that require grad."""
        return list(trainable_parameters(self.module, own=True).values())

    @property
    def parameters(self) -> int:
        """How many trainable values the module itself holds."""
        return sum(p.numel() for p in self.trainable)

    @property
    def bytes_per_sample(self) -> int:
        """What the per-sample gradients of one sample take."""
        return sum(p.numel() * p.element_size() for p in self.trainable) if self.recorded else 0


class Report:
    """What `convert_model` has made of a model: one row a module; print it for a table."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @property
    def parameters(self) -> int:
        """Trainable values, shared ones counted once."""
        return sum({id(p): p.numel() for row in self.rows for p in row.trainable}.values())

    @property
    def bytes_per_sample(self) -> int:
        """Memory of the per-sample gradients, in bytes a sample, shared parameters counted once."""
        found = {
            id(p): p.numel() * p.element_size() for row in self.rows if row.recorded for p in row.trainable
        }
        return sum(found.values())

    @property
    def fast(self) -> float:
        """The share of the trainable values that are on fast ops (replacements, and what other ways send
        there).
        """
        found = {id(p): p.numel() for row in self.rows for p in row.fast}
        return sum(found.values()) / max(self.parameters, 1)

    def __str__(self) -> str:
        head = ("module", "class", "replacement", "parameters", "bytes/sample")
        table = [
            (
                row.path or "(model)",
                row.original.__name__,
                row.handled,
                f"{row.parameters:,}",
                f"{row.bytes_per_sample:,}",
            )
            for row in self.rows
        ]
        table.append(("total", "", "", f"{self.parameters:,}", f"{self.bytes_per_sample:,}"))
        widths = [max(len(line[i]) for line in (head, *table)) for i in range(len(head))]
        lines = [
            "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(line, "<<<>>", widths, strict=True))
            for line in (head, tuple("-" * w for w in widths), *table)
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def report(model: nn.Module) -> Report:
    """How each module of a converted model is handled: path, class, replacement, parameters, bytes per
    sample.

    Modules without a replacement are proved in the first call (or with an example): before, their way is not
    known.

    Example:
        >>> import torch, pslayers as ps
        >>> print(ps.report(ps.convert_model(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()))))
        module   class       replacement  parameters  bytes/sample
        -------  ----------  -----------  ----------  ------------
        (model)  Sequential  container             0             0
        0        Linear      PSLinear             15            60
        total                                     15            60
    """
    rows: list[Row] = []
    ways: dict[str, str] = {}  # of modules that are run whole, with all that is below them
    slow = frozenset(_slow(model))
    for path, module in contents.named_modules(model):
        above = next(
            (f"{w} of {p or '(model)'}" for p, w in ways.items() if path.startswith(f"{p}." if p else "")), ""
        )
        if isinstance(module, Converted):
            state = module._ps_state()
            general, original = state.per_sample_forward, original_class(type(module))
            way = "/".join(sorted({plan.way for plan in state.plans.values()})) if general else ""
            if state.includes_children and not above:
                ways[path] = way
            rows.append(Row(path, module, original, type(module), general, above or way, slow))
        elif callable_module(module) and trainable_parameters(module, own=True):
            rows.append(Row(path, module, type(module), None, way=above, slow=slow))
    return Report(rows)


def _slow(model: nn.Module) -> Iterator[int]:
    """The ids of parameters of general modules that some call of theirs does not use by a fast op, or has not
    used so far.
    """
    for module in contents.modules(model):
        if isinstance(module, PSContainer) and (state := module._ps_state()).per_sample_forward:
            for name, param in trainable_parameters(module, own=not state.includes_children).items():
                if not state.plans or any(
                    name not in plan.fast | plan.others for plan in state.plans.values()
                ):
                    yield id(param)
