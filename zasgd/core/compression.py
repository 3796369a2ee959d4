"""How what travels may be compressed, and how a run has chosen: names and a share, without the loops of `compress`.

Decides nothing. Apart from those loops because commands that only read a recipe need no compiler.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

CODECS = ("none", "bf16", "fp16", "int8", "topk")
FEEDBACK = frozenset({"int8", "topk"})
"""Codecs of pushes that keep what was not sent."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How float32 vectors are compressed: one of CODECS, and the share of elements that topk sends, in (0, 1].

    Raises ValueError for anything else.
    """

    codec: str = "none"
    share: float = 0.01

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"compression is one of {', '.join(CODECS)}, not {self.codec!r}")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"share, the part of the elements that topk sends, is in (0, 1], not {self.share!r}")

    def to_plain(self) -> dict[str, Any]:
        """A text and a number, for the wire and for files."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> Compression:
        """The inverse of to_plain; absent keys take their defaults. Raises ValueError for anything else."""
        known = [f.name for f in fields(cls)]
        if not isinstance(plain, dict) or not plain.keys() <= set(known):
            raise ValueError(f"a compression has the keys {', '.join(known)}, not {plain!r:.80}")
        return cls(**plain)


UNCOMPRESSED = Compression()
