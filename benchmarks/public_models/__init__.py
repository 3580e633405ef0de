"""Whole models of public libraries, tiny and with random weights: what `coverage.py` and
`tests/public_models` run.

Nothing is downloaded. A model's name is "library/model"; `MODELS` holds all of them, `TRAINING` models with
heads and labels.
"""

from .case import Inputs, PublicModel
from .libraries import LIBRARIES, library
from .timm_models import TIMM
from .torchvision_models import TORCHVISION
from .training_models import TRAINING, TrainingCase, checkpointed
from .transformers_models import TRANSFORMERS
from .truth import Rows, clipped, compare, loop, losses, part, rows_of

MODELS: dict[str, PublicModel] = {case.name: case for case in (*TRANSFORMERS, *TIMM, *TORCHVISION)}

__all__ = [
    "Inputs",
    "LIBRARIES",
    "MODELS",
    "PublicModel",
    "Rows",
    "TRAINING",
    "TrainingCase",
    "checkpointed",
    "clipped",
    "compare",
    "library",
    "loop",
    "losses",
    "part",
    "rows_of",
]
