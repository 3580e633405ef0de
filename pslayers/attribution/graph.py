"""What the autograd graph of an output tells: of functions that somebody has written, and of parameters that
are reached past their layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from torch import Tensor

from .. import torch_api
from ..core.expansion import leads_to_rows
from ..core.trees import tensors_of

_PACKAGE = __name__.partition(".")[0] + "."  # of the library's own ops


def edges_of(output: Any) -> set[tuple[Any, int]]:
    """All edges of the graph of an output: its nodes, and which of their outputs."""
    todo = list[tuple[Any, int]]()
    with torch_api.without_torch_function():
        for t in tensors_of(output):
            # torch refuses a view of what was changed in place since: kept by a module since an earlier call
            with suppress(RuntimeError):
                if t.grad_fn is not None:
                    todo.append((t.grad_fn, t.output_nr))
    seen, nodes = set(todo), set()
    while todo:
        node, _ = todo.pop()
        if node not in nodes:
            nodes.add(node)
            new = [(before, number) for before, number in node.next_functions if before is not None]
            seen.update(new)
            todo += new
    return seen


def by_ops_of_ours(output: Any) -> bool:
    """Whether a call of a converted model lies in the graph of an output."""
    return any(map(_is_ours, _nodes_of(output)))


def function_of(node: Any) -> type:
    """The autograd.Function whose node it is; NoneType where it is torch's own."""
    found: type = getattr(type(node), "_forward_cls", type(None))
    return found


def _nodes_of(output: Any) -> set[Any]:
    return {node for node, _ in edges_of(output)}


def foreign_functions(output: Any) -> list[Any]:
    """The nodes of functions that somebody has written (`torch.autograd.Function`) in the graph of an output:
    reentrant checkpoints and reversible layers run backward passes of their own in theirs.
    """
    of_functions = (node for node in _nodes_of(output) if function_of(node) is not type(None))
    return [node for node in of_functions if not _is_ours(node)]


def _given(output: Any) -> Iterator[Any]:
    """The nodes of what such functions are given."""
    return (before for node in foreign_functions(output) for before, _ in node.next_functions)


def parameters_given(output: Any) -> bool:
    """Whether such functions are given parameters themselves, or what stands for those of one sample: they
    may run layers again in their backward, and ask for the parameters' gradients.
    """
    return any(hasattr(node, "variable") or getattr(node, "recorders", None) for node in _given(output))


def given_to_functions(output: Any) -> set[int]:
    """The ids of the parameters that such functions are given themselves."""
    return {id(node.variable) for node in _given(output) if hasattr(node, "variable")}


def leaves_of(output: Any) -> set[int]:
    """The ids of the leaves that an output is made of by anything but the library's own ops."""
    nodes = (node for node in _nodes_of(output) if not _is_ours(node))
    before = (leaf for node in nodes for leaf, _ in node.next_functions)
    return {id(leaf.variable) for leaf in before if hasattr(leaf, "variable")}


def _is_ours(node: Any) -> bool:
    return function_of(node).__module__.startswith(_PACKAGE)


def past_expansions(output: Any, params: Sequence[Tensor]) -> bool:
    """Whether one of these parameters, or of the tensors that torch.func.functional_call has put in their
    place, is reached, in the graph of an output, by anything but the library's own ops with rows of it, which
    come after it.
    """
    watched = {id(p) for p in params if p.requires_grad}
    given = {p.grad_fn for p in params if p.grad_fn is not None}
    for node in _nodes_of(output):
        ours = _is_ours(node)
        functions = [following for following, _ in node.next_functions]
        for following, after in zip_longest(functions, functions[1:]):
            reached = id(getattr(following, "variable", None)) in watched
            if (reached and not (ours and leads_to_rows(after))) or (following in given and not ours):
                return True
    return False
