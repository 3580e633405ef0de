"""PublicModel: how one model is built and what it is called with."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]

# relative tolerances: float64 throughout, and where a part of the model computes in float32
EXACT, SINGLE = 1e-8, 5e-5


@dataclass(frozen=True)
class PublicModel:
    """One model: `build()` gives it, `inputs(n)` the keyword arguments for n samples, with the batch in dim 0
    of each.

    `single`: why its rows are compared by the tolerance of float32, "" for float64. `double`: whether it runs
    in float64 at all. `copies`: how often the loop takes each sample, to count its first loss only. `once`:
    why plain training, too, can call it but once, "" if it can call it again.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    single: str = ""
    double: bool = True
    copies: int = 1
    once: str = ""

    @property
    def library(self) -> str:
        """The package that the model comes from."""
        return self.name.split("/")[0]

    @property
    def tolerance(self) -> float:
        """How far a row may be from the loop's, relative to the parameter's largest value."""
        return SINGLE if self.single else EXACT

    def make(self, seed: int = 0) -> nn.Module:
        """The model in eval mode, every parameter moved off its initial value, so that zeros and ones matter
        too.
        """
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.build().eval()
        if self.double:
            model.double()
        _without_dropout(model)
        for param in model.parameters():
            param.data.add_(0.02 * torch.randn_like(param))
        return model

    def batch(self, size: int, seed: int = 1) -> Inputs:
        """Inputs for `size` samples."""
        torch.manual_seed(seed)
        inputs = self.inputs(size)
        return (
            inputs
            if self.double
            else {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
        )


def _without_dropout(model: nn.Module) -> None:
    """Every rate of dropout, stochastic depth, ... becomes 0: some engines need training mode."""
    for module in model.modules():
        for name, value in vars(module).items():
            rate = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if rate and isinstance(value, float):
                setattr(module, name, 0.0)


def ids(n: int, length: int = 8, name: str = "input_ids", **more: int) -> Inputs:
    """Tokens 3 .. 49; `more` gives the names and lengths of further inputs of tokens."""
    return {key: torch.randint(3, 50, (n, size)) for key, size in {name: length, **more}.items()}


def floats(n: int, **shapes: tuple[int, ...]) -> Inputs:
    """Normal values of these shapes."""
    return {name: torch.randn(n, *shape, dtype=torch.float64) for name, shape in shapes.items()}


def image(n: int, size: int = 32, name: str = "pixel_values") -> Inputs:
    """Square images of three channels."""
    return floats(n, **{name: (3, size, size)})
