"""check_layer and check_model: prove on given inputs that every per-sample gradient is right, or name what is
not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .checking.comparison import Comparison
from .checking.losses import RealCall
from .checking.samples import each_leaf, fresh, in_dtype
from .checking.trials import Trials, copied
from .convert import convert_model, wholly_converted
from .core import contents
from .core.context import local
from .core.trees import tensors_in
from .modules.converted import Converted


@dataclass
class Check:
    """The answer of a check: true where everything is right; printed, it says what is wrong, and what was not
    checked.

    ``problems`` name the parameter, the row and the error, or the samples that interact and the batch in
    which they do; ``notes`` say what could not be checked.
    """

    samples: int
    parameters: list[str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        what = f"{len(self.parameters)} parameters x {self.samples} samples"
        text = f"right: {what} agree with a loop over samples, and no sample touches another's row"
        if self.problems:
            text = f"wrong ({what}):" + "".join(f"\n- {problem}" for problem in self.problems)
        return text + "".join(f"\n(note: {note})" for note in self.notes)

    __repr__ = __str__


def check_layer(layer: nn.Module, *inputs: Any, **options: Any) -> Check:
    """Check one layer, a PSLayer of your own for instance: see `check_model`, whose options it takes.

    Example:
        >>> import torch, pslayers as ps
        >>> ps.check_layer(ps.PSLinear(3, 2), torch.randn(4, 5, 3))
        right: 2 parameters x 4 samples agree with a loop over samples, and no sample touches another's row
    """
    return check_model(layer, *inputs, **options)


def check_model(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    closure: Callable[..., Tensor] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    seed: int = 0,
    **keywords: Any,
) -> Check:
    """Prove on these inputs that every per-sample gradient of `model` is right, or name what is not: in it,
    or in your loss.

    Give the call as you train with it: the batch, the loss, the targets. On copies of the model (`model`
    itself, its ``.grad`` and the random generators stay as they are) it is checked that

    1. outputs, loss and summed gradients are those of the original layers;
    2. each row is the gradient that the original layers give for that sample's loss (a loop over samples). Of
       losses (B,), each is back-propagated by itself, too: no other sample's row may be touched;
    3. samples do not interact, also where autograd does not see it: what a sample gives alone it must give in
       every batch, of other sizes, in another order, each sample twice, among samples whose values, ids or
       lengths are changed;
    4. a loss that is one number is the mean of its samples' losses (or their sum, with
       ``loss_reduction="sum"``), as the rows of a mean (a sum) are told from it. If it is not, the answer
       says what it is instead, and the way out.

    Random layers (dropout) see the same random numbers each time. What compares a sample alone with its batch
    is done without them, and the answer says so. Give three samples or more, that differ in length where
    yours do, and as many as no other dim is long: then it is plain which dim holds them.

    Args:
        model: any model, converted (then with its ``loss_reduction``) or not.
        inputs: what the model is called with (`keywords` too; one that is called like an option here goes
            into a closure). Tensors that have a row for each sample in their batch dim are split; others are
            the same for all samples.
        loss_fn: ``loss_fn(output)``, or ``loss_fn(output, targets)``: the losses of the samples (B,), or the
            one loss that you train with. For a model that returns its own loss: ``lambda output:
            output.loss``. By default a fixed projection of everything floating in the output.
        targets: what `loss_fn` takes beside the output: a tensor, or a structure of tensors, with a row for
            each sample.
        closure: in the place of both, where a step is more than ``loss_fn(model(*inputs), targets)``:
            ``closure(model, *inputs, **keywords)`` returns the loss or the losses. Targets are then among the
            inputs.
        dtype: the copies', the inputs' and the targets' floating dtype; None leaves them as they are.
        tolerance: the error allowed, relative to the largest value of the parameter's gradients; by default
            by the lowest precision that the model computes in.
        seed: of random layers, and of the projection.

    Raises:
        ConversionError: the model cannot be converted.
        TypeError: `loss_fn` or `closure` cannot be called so, or does not return a tensor.
        ValueError: the batch size is unknown, an output has no batch dim, the loss has another shape than ()
            or (B,), no target has a row for each sample, or options exclude one another.

    Example:
        >>> import torch, pslayers as ps
        >>> from torch.nn.functional import cross_entropy
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        >>> ps.check_model(model, x, loss_fn=cross_entropy, targets=y)
        right: 2 parameters x 4 samples agree with a loop over samples, and no sample touches another's row
        >>> class Centred(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return torch.tanh(self.fc(x)) - torch.tanh(self.fc(x)).mean(0)       # mixes samples
        >>> bool(ps.check_model(Centred(), torch.randn(3, 2)))
        False
    """
    call = RealCall(loss_fn, targets, closure)
    plain, twin = copied(model), copied(model)
    if not any(isinstance(m, Converted) for m in contents.modules(twin)):
        convert_model(twin)
    twin = wholly_converted(twin)
    if local.explicit is None and local.ragged is None and not tensors_in((inputs, keywords)):
        raise ValueError("check_model was given no tensor, so the batch size is unknown.")
    if dtype is not None:
        for module in filter(None, (plain, twin, call.module)):
            module._apply(lambda t: in_dtype(t, dtype))
    value = each_leaf(lambda leaf: fresh(leaf, dtype), ((inputs, keywords), targets))
    trials = Trials(plain, twin, call, value, seed, tolerance)
    comparison = Comparison(trials)
    comparison.run()
    return Check(trials.size, list(trials.params), comparison.problems, comparison.notes)
