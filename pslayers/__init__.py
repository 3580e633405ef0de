from . import functional
from .expand import batch_size
from .layers import *
