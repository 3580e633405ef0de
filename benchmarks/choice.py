"""Which cells and engines a run of the study takes, by their names."""

import pkgutil
from collections.abc import Iterable

from . import (
    captured,  # noqa: F401 -- they register themselves
    cases,  # noqa: F401 -- they register themselves
    engines,
    peers,  # noqa: F401 -- they register themselves
    registry,
    without_rows,  # noqa: F401 -- they register themselves
)
from .report import APART

FACTORED = (  # clipped steps and Gram matrices that are part of "all"
    "mlp_wide",
    "gpt_tied",
    "vit",
    "depthwise_cnn_clipped",
    "text_lstm",
    "imdb_embedding_clipped",
    "mlp_gram",
    "cifar_cnn_gram",
    "transformer_gram",
    "text_lstm_gram",
)


def chosen_cells(names: Iterable[str], models: Iterable[str] = (), task: str = "rows") -> list[registry.Case]:
    """The cases with these names or of these groups ("all": all of rows but those `APART`, and `FACTORED`),
    and those at import paths (``module:build``), which are measured for `task`.

    A user's ``build(batch_size)`` returns a `registry.Problem`, or a tuple of the same four.
    """
    found: dict[str, registry.Case] = {}
    for name in names:
        chosen = [
            c
            for c in registry.CASES.values()
            if name in (c.name, c.group)
            or (name == "all" and (c.name in FACTORED or (c.group not in APART and c.task == "rows")))
        ]
        if not chosen:
            known = sorted({c.group for c in registry.CASES.values()}) + sorted(registry.CASES)
            raise ValueError(f"There is no cell {name!r}; there are: all, {', '.join(known)}.")
        found |= {c.name: c for c in chosen}
    return [*found.values(), *(registry.from_path(path, task) for path in models)]


def chosen_engines(names: Iterable[str]) -> list[type[engines.Engine]]:
    """The engines with these names ("all", "peers"), and users' own at import paths (``module:Class``); plain
    and limit always.
    """
    found: dict[str, type[engines.Engine]] = {"plain": engines.Plain, "limit": engines.Limit}
    for name in names:
        if ":" in name:
            kind = pkgutil.resolve_name(name)
            found[kind.name] = kind
            continue
        chosen = {
            k: e
            for k, e in engines.ENGINES.items()
            if name == k or (name == "all" and not e.by_name_only) or (name == "peers" and e.peer)
        }
        if not chosen:
            raise ValueError(
                f"There is no engine {name!r}; there are: all, peers, {', '.join(engines.ENGINES)}."
            )
        found |= chosen
    return list(found.values())
