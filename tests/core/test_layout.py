"""Where tensors lie: aligned, without gaps, even over the shards, and the same on every machine."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core.layout import ALIGN_BYTES, SECTIONS, Layout, LayoutError, TensorSpec

VGG16_CONVS = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]


def vgg16() -> Layout:
    """VGG16 as torchvision names and shapes it; one layer holds three quarters of its 138,357,544 parameters."""
    tensors, channels = [], 3
    for i, width in enumerate(VGG16_CONVS):
        tensors += [TensorSpec(f"features.{i}.weight", (width, channels, 3, 3))]
        tensors += [TensorSpec(f"features.{i}.bias", (width,), group=1)]
        channels = width
    for i, (rows, columns) in enumerate([(4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)]):
        tensors += [TensorSpec(f"classifier.{i}.weight", (rows, columns))]
        tensors += [TensorSpec(f"classifier.{i}.bias", (rows,), group=1)]
    return Layout(tuple(tensors))


def with_buffers() -> Layout:
    return Layout(
        (
            TensorSpec("conv.weight", (8, 3, 3, 3)),
            TensorSpec("bn.weight", (8,), group=1),
            TensorSpec("bn.running_mean", (8,), "float32", "stats"),
            TensorSpec("bn.num_batches_tracked", (), "int64", "counters"),
            TensorSpec("head.weight", (10, 8), "bfloat16"),
            TensorSpec("head.bias", (10,), group=1),
        )
    )


tensors = st.builds(
    TensorSpec,
    st.text(min_size=1, max_size=20),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["params", "stats"]),
    st.integers(0, 3),
)
layouts = st.lists(tensors, max_size=12, unique_by=lambda t: t.name).map(lambda ts: Layout(tuple(ts)))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 16])
def test_vgg16_is_balanced_over_the_shards_although_one_layer_is_most_of_it(num_shards: int) -> None:
    layout = vgg16()
    assert layout.num_parameters == 138_357_544
    sizes = [s.size for s in layout.slices("params", num_shards)]
    fair = sum(sizes) / num_shards
    assert all(abs(size - fair) <= 0.1 * fair for size in sizes)
    assert max(sizes) - min(sizes) <= ALIGN_BYTES // SECTIONS["params"]


@given(layouts, st.integers(1, 9), st.sampled_from(sorted(SECTIONS)))
def test_slices_are_aligned_consecutive_even_and_cover_the_section(
    layout: Layout, num_shards: int, section: str
) -> None:
    slices = layout.slices(section, num_shards)
    unit = ALIGN_BYTES // SECTIONS[section]
    assert len(slices) == num_shards
    assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
    assert slices[-1].stop == layout.sizes[section]
    assert all(s.start % unit == 0 for s in slices)
    assert max(s.size for s in slices) - min(s.size for s in slices) <= unit


@given(layouts)
def test_tensors_are_aligned_and_do_not_overlap(layout: Layout) -> None:
    for section, itemsize in SECTIONS.items():
        end = 0
        for t in layout.of_section(section):
            offset = layout.offsets[t.name]
            assert offset * itemsize % ALIGN_BYTES == 0
            assert offset == end  # no element is lost between two tensors
            end = offset + -(-t.num_elements * itemsize // ALIGN_BYTES) * ALIGN_BYTES // itemsize
        assert layout.sizes[section] == end


@given(layouts, st.integers(1, 9))
def test_segments_cover_every_slice_and_name_the_tensor_of_every_element(layout: Layout, num_shards: int) -> None:
    tensors = layout.of_section("params")
    owner: dict[int, int] = {}
    for i, t in enumerate(tensors):
        owner |= dict.fromkeys(range(layout.offsets[t.name], layout.offsets[t.name] + t.num_elements), i)
    for part in layout.slices("params", num_shards):
        segments = layout.segments(part)
        assert [s.start for s in segments] == [0, *(s.stop for s in segments)][: len(segments)]
        assert (segments[-1].stop if segments else 0) == part.size
        assert all(a.tensor < b.tensor for a, b in itertools.pairwise(segments))
        for segment in segments:
            assert segment.start < segment.stop and segment.group == tensors[segment.tensor].group
            for i in range(segment.start, segment.stop):
                assert owner.get(part.start + i, segment.tensor) == segment.tensor


def test_a_tensor_that_straddles_shards_is_in_the_segments_of_each() -> None:
    layout = Layout((TensorSpec("a", (16,)), TensorSpec("b", (32,), group=1), TensorSpec("c", (16,))))
    first, second = (layout.segments(part) for part in layout.slices("params", 2))
    assert first == ((0, 16, 0, 0), (16, 32, 1, 1))
    assert second == ((0, 16, 1, 1), (16, 32, 0, 2))


def test_tensors_are_counted_within_the_parameters_also_those_without_elements() -> None:
    sizes = {"a": (3,), "empty": (0,), "b": (20,)}
    specs = [TensorSpec(name, shape, group=i) for i, (name, shape) in enumerate(sizes.items())]
    layout = Layout((TensorSpec("mean", (5,), section="stats"), *specs))
    assert layout.segments(layout.slices("params", 1)[0]) == ((0, 16, 0, 0), (16, 48, 2, 2))


def test_a_model_of_one_cache_line_lies_on_the_first_of_four_shards() -> None:
    layout = Layout((TensorSpec("w", (10,)),))
    assert [s.size for s in layout.slices("params", 4)] == [16, 0, 0, 0]
    assert [len(layout.segments(s)) for s in layout.slices("params", 4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("num_shards", [0, -1])
def test_a_layout_needs_a_shard(num_shards: int) -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        with_buffers().slices("params", num_shards)


def test_the_hash_is_the_same_in_every_process_and_version(golden: Any) -> None:
    golden("wire/layouts.txt", {"vgg16": vgg16().hash, "with_buffers": with_buffers().hash, "empty": Layout(()).hash})


def test_the_hash_sees_names_shapes_dtypes_sections_groups_and_order() -> None:
    a, b = TensorSpec("a", (2, 3)), TensorSpec("b", (2,))
    changed = [
        Layout((a._replace(name="c"), b)),
        Layout((a._replace(shape=(3, 2)), b)),
        Layout((a._replace(dtype="float16"), b)),
        Layout((a._replace(section="stats"), b)),
        Layout((a._replace(group=1), b)),
        Layout((b, a)),
        Layout((a,)),
    ]
    assert len({layout.hash for layout in (Layout((a, b)), *changed)}) == 1 + len(changed)


@given(layouts)
def test_plain_and_back(layout: Layout) -> None:
    again = Layout.from_plain(layout.to_plain())
    assert again == layout
    assert again.hash == layout.hash


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (TensorSpec("", (1,)), "name has 1 to 1024"),
        (TensorSpec("n" * 1025, (1,)), "name has 1 to 1024"),
        (TensorSpec("w", (-1,)), "impossible shape"),
        (TensorSpec("w", (1,) * 9), "impossible shape"),
        (TensorSpec("w", (1 << 41, 0)), "impossible shape"),
        (TensorSpec("w", (1 << 21, 1 << 21)), "at most 1099511627776 elements"),
        (TensorSpec("w", (1,), group=-1), "impossible shape or group"),
        (TensorSpec("w", (1,), group=65536), "impossible shape or group"),
        (TensorSpec("w", (1,), "int64"), "dtype int64 cannot be one of the params"),
        (TensorSpec("w", (1,), "float64"), "dtype float64 cannot be one of the params"),
        (TensorSpec("w", (1,), "object"), "dtype object"),
        (TensorSpec("w", (1,), "float32", "counters"), "dtype float32 cannot be one of the counters"),
        (TensorSpec("w", (1,), "float32", "weights"), "unknown section 'weights'"),
    ],
)
def test_an_impossible_tensor_is_named(spec: TensorSpec, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        Layout((TensorSpec("fine", (2,)), spec))


def test_two_tensors_of_one_name_are_found_at_once_among_65536() -> None:
    specs = [TensorSpec(str(i), (1,)) for i in range(65_535)] + [TensorSpec("65534", (1,))]
    start = time.perf_counter()
    with pytest.raises(LayoutError, match="two tensors are named '65534'"):
        Layout(tuple(specs))
    assert time.perf_counter() - start < 5
    with pytest.raises(LayoutError, match="at most 65536 tensors"):
        Layout((*specs, *specs))


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=4)
    | st.sampled_from(["float32", "int64", "params", "stats", "counters"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)  # fmt: skip
almost = st.lists(
    st.tuples(
        st.text(max_size=3) | garbage,
        st.lists(st.integers(-1, 1 << 64) | garbage, max_size=9) | garbage,
        st.sampled_from(["float32", "int64", "float64"]) | garbage,
        st.sampled_from(["params", "counters"]) | garbage,
        st.integers(-1, 65536) | garbage,
    ).map(list),
    max_size=3,
)


@given(garbage | almost)
def test_garbage_is_refused_with_layout_error_only(plain: Any) -> None:
    try:
        layout = Layout.from_plain(plain)
    except LayoutError as e:
        assert len(str(e)) < 512
    else:
        assert layout.to_plain() == plain
        assert len(layout.hash) == 16
