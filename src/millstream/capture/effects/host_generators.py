"""Random generators of Python and NumPy: their states, and copies of them."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
"""Their kinds."""


class StandsForGenerator:
    """Base of what stands in the place of a generator, ``__wrapped__``, while a step is traced."""


def state_of(generator: Any) -> Any:
    """The state of a generator, by which it can be compared and put back."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Put a generator back to a state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def copy_of(generator: Any) -> Any:
    """Another generator that gives the same numbers."""
    return copy.deepcopy(generator)
