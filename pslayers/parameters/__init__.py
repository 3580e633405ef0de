"""A parameter of which each sample has its own, as one tensor: what torch's functions do to it."""

from . import rules  # noqa: F401 -- they enter themselves
