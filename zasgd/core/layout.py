"""Where every tensor lives: in the flat vectors of a run and in the slices of its shards.

Decides offsets, slices and group segments; never holds a value. A layout has three sections, each one flat
vector that is cut over the shards: `params` (float32, trained), `stats` (float32 buffers such as BatchNorm's
means, moved by what a batch changed) and `counters` (int64 buffers, maximum taken).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

ALIGN_BYTES = 64
"""Every tensor and every slice begins on a multiple of this: one cache line, one AVX-512 vector."""

SECTIONS: dict[str, int] = {"params": 4, "stats": 4, "counters": 8}
"""Section name -> bytes per element in its flat vector."""

TORCH_DTYPES = frozenset(
    {"float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
"""The torch dtype names that a layout or a tagged tensor may carry."""

_SECTION_DTYPES = {
    "params": {"float32", "float16", "bfloat16"},
    "stats": {"float32", "float16", "bfloat16"},
    "counters": {"int64", "int32", "int16", "int8", "uint8", "bool"},
}
MAX_TENSORS = 65536
MAX_NAME_LENGTH = 1024
MAX_ELEMENTS = 1 << 40


class LayoutError(ValueError):
    """A layout that cannot be: duplicate names, unknown dtype, negative size, no shard to put it on."""


class TensorSpec(NamedTuple):
    """One tensor: its name in the state_dict, shape, torch dtype name, section and parameter group."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    section: str = "params"
    group: int = 0

    @property
    def num_elements(self) -> int:
        """Elements, 1 for a scalar."""
        return math.prod(self.shape)


class Segment(NamedTuple):
    """Elements `start` to `stop` of a slice: one tensor's part, of parameter group `group`.

    tensor: the tensor's place among those of the params section.
    """

    start: int
    stop: int
    group: int
    tensor: int = 0


class Slice(NamedTuple):
    """Elements `start` to `stop` of a flat vector."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements in the slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The ordered tensors of a model; two processes agree on it when their `hash` agrees."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise LayoutError(f"a layout has at most {MAX_TENSORS} tensors")
        for t in self.tensors:
            _check_tensor(t)
        twice = [name for name, count in Counter(t.name for t in self.tensors).items() if count > 1]
        if twice:
            raise LayoutError(f"two tensors are named {twice[0][:80]!r}")
        if sum(t.num_elements for t in self.tensors) > MAX_ELEMENTS:
            raise LayoutError(f"a layout has at most {MAX_ELEMENTS} elements")

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits over names, shapes, dtypes, sections and groups, in order."""
        text = json.dumps(self.to_plain(), separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Tensor name -> first element in its section's flat vector."""
        return self._placed[0]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Section -> elements of its flat vector, padding included."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[dict[str, int], dict[str, int]]:
        offsets: dict[str, int] = {}
        sizes = dict.fromkeys(SECTIONS, 0)
        for t in self.tensors:
            offsets[t.name] = sizes[t.section]
            sizes[t.section] += _aligned(t.num_elements, t.section)
        return offsets, sizes

    @property
    def num_parameters(self) -> int:
        """Trained elements, padding not counted."""
        return sum(t.num_elements for t in self.tensors if t.section == "params")

    def of_section(self, section: str) -> list[TensorSpec]:
        """The tensors of one section, in order."""
        return [t for t in self.tensors if t.section == section]

    def slices(self, section: str, num_shards: int) -> tuple[Slice, ...]:
        """Cut a section's flat vector into `num_shards` consecutive slices, equal up to one cache line.

        A tensor may straddle shards; with fewer cache lines than shards some slices are empty. Raises
        LayoutError for less than one shard.
        """
        found = self._cuts.get((section, num_shards))
        if found is None:
            found = self._cuts[section, num_shards] = self._cut(section, num_shards)
        return found

    @cached_property
    def _cuts(self) -> dict[tuple[str, int], tuple[Slice, ...]]:
        """Slices computed so far: every step asks for the same few."""
        return {}

    def _cut(self, section: str, num_shards: int) -> tuple[Slice, ...]:
        if num_shards < 1:
            raise LayoutError(f"a layout cannot be cut over {num_shards} shards; at least 1 is needed")
        unit = ALIGN_BYTES // SECTIONS[section]
        num_units = self.sizes[section] // unit
        cuts = [-(-i * num_units // num_shards) * unit for i in range(num_shards + 1)]
        return tuple(Slice(start, stop) for start, stop in pairwise(cuts))

    def segments(self, part: Slice) -> tuple[Segment, ...]:
        """The tensors inside a slice of the params section, in order, relative to the slice.

        They cover the slice without gaps: padding belongs to the tensor before it. A tensor without elements, or
        outside the slice, has no segment.
        """
        found: list[Segment] = []
        for i, t in enumerate(self.of_section("params")):
            start = max(self.offsets[t.name], part.start) - part.start
            stop = min(self.offsets[t.name] + _aligned(t.num_elements, "params"), part.stop) - part.start
            if start < stop:
                found.append(Segment(start, stop, t.group, i))
        return tuple(found)

    def to_plain(self) -> list[list[Any]]:
        """Lists, texts and integers only, for the wire and for files."""
        return [[t.name, list(t.shape), t.dtype, t.section, t.group] for t in self.tensors]

    @classmethod
    def from_plain(cls, plain: Any) -> Layout:
        """The inverse of to_plain; raises LayoutError for anything else."""
        if type(plain) is not list:
            raise LayoutError("a layout is a list of tensors")
        return cls(tuple(_tensor_from_plain(row) for row in plain))


def _aligned(num_elements: int, section: str) -> int:
    unit = ALIGN_BYTES // SECTIONS[section]
    return -(-num_elements // unit) * unit


def _check_tensor(t: TensorSpec) -> None:
    if not 0 < len(t.name) <= MAX_NAME_LENGTH:
        raise LayoutError(f"a tensor's name has 1 to {MAX_NAME_LENGTH} characters, not {len(t.name)}")
    if t.section not in SECTIONS:
        raise LayoutError(f"tensor {t.name[:80]!r}: unknown section {t.section[:40]!r}")
    if t.dtype not in _SECTION_DTYPES[t.section]:
        raise LayoutError(f"tensor {t.name[:80]!r}: dtype {t.dtype[:40]} cannot be one of the {t.section}")
    if len(t.shape) > 8 or any(not 0 <= n <= MAX_ELEMENTS for n in t.shape) or not 0 <= t.group < 1 << 16:
        raise LayoutError(f"tensor {t.name[:80]!r}: impossible shape or group")


def _tensor_from_plain(row: Any) -> TensorSpec:
    if type(row) is not list or len(row) != 5:
        raise LayoutError("a tensor is (name, shape, dtype, section, group)")
    name, shape, dtype, section, group = row
    texts = (type(name), type(dtype), type(section)) == (str, str, str)
    if not texts or type(shape) is not list or type(group) is not int or not _integers(shape):
        raise LayoutError("a tensor is (name, shape, dtype, section, group)")
    return TensorSpec(name, tuple(shape), dtype, section, group)


def _integers(values: Iterable[Any]) -> bool:
    return all(type(v) is int for v in values)
