"""Whole models of public libraries, tiny and with random weights: what `coverage.py` and `tests/public_models` run.

Nothing is downloaded. A model's name is "library/model"; `MODELS` holds all of them.
"""

from .case import Inputs, PublicModel
from .libraries import LIBRARIES, library
from .timm_models import TIMM
from .torchvision_models import TORCHVISION
from .transformers_models import TRANSFORMERS
from .truth import Rows, compare, loop, losses, rows_of

MODELS: dict[str, PublicModel] = {case.name: case for case in (*TRANSFORMERS, *TIMM, *TORCHVISION)}

__all__ = ["Inputs", "LIBRARIES", "MODELS", "PublicModel", "Rows", "compare", "library", "loop", "losses", "rows_of"]
