"""Modules without a replacement (with a class token, say): how their forward is run so that each sample has
parameters of its own. A first call has a way chosen (`modules/how_modules_run.py`), calls go by it
(`PSContainer._ps_run`); a model called under `ps.sample_ids` may be run whole (`modules/ragged_call.py`).

Three ways, the fastest first; a way is taken only after it has been proved on the very inputs of the module's
call:

- "direct": the forward runs as it is, once, with tensors in the place of parameters that stand for one of
  each sample (`PerSample`), and know what to do in torch's functions. Where those must know whose the rows of
  other tensors are, these are followed through the forward. The module's own parameters are replaced, and
  what lies below stays on its fast ops; or all that is below it too.
- "vmap": the forward runs under torch.func.vmap, everything trainable below it per sample.
- "loop": the forward runs sample by sample. Always right, and slow: it is said once, by name.

The proof: the outputs are those of the plain module; the rows add up to the plain gradient; and when the
gradient of each sample's outputs is multiplied by a number of its own, so is that sample's row.
"""

from .calls import ParametersReturnedError, run, run_ragged, run_single
from .choice import choose
from .plan import Layouts, NoWayError, OtherNumberError, fits, places

__all__ = [
    "Layouts",
    "NoWayError",
    "OtherNumberError",
    "ParametersReturnedError",
    "choose",
    "fits",
    "places",
    "run",
    "run_ragged",
    "run_single",
]
