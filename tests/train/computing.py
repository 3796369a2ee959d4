"""What tests of the trainer share: a gradient in a memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zasgd.core.messages import Grant
from zasgd.core.worker import Gradient
from zasgd.train.trainer import Trainer


def gradient(trainer: Trainer, grants: Sequence[Grant], samples: int, own: Any = None, **values: Any) -> Gradient:
    """What to push for `grants`, at the trainer's values or, of a section in `values`, at those."""
    memory = trainer.new_memory()
    for section, vector in values.items():
        getattr(memory, section)[:] = vector
    return trainer.gradient(grants, memory, samples, own)
