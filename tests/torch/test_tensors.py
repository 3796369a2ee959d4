"""Tensors of every kind survive the way through the real wire encoder, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zasgd.core import codec
from zasgd.core.codec import WireError
from zasgd.core.layout import TORCH_DTYPES
from zasgd.torch.tensors import tensor_from_wire, tensor_to_wire


def through_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Encode, pack, unpack from read-only bytes, decode."""
    name, array = tensor_to_wire(tensor)
    body, buffers = codec.pack([name, array])
    received = codec.unpack(body, [bytes(b) for b in buffers])
    return tensor_from_wire(*received)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(back: torch.Tensor, sent: torch.Tensor) -> None:
    assert (back.dtype, back.shape) == (sent.dtype, sent.shape)
    assert bits(back.reshape(-1)) == bits(sent.reshape(-1))


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype_of_the_allow_list_round_trips(name):
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (7, 5, 8), generator=generator, dtype=torch.uint8)
    dtype = getattr(torch, name)
    sent = raw[..., 0] > 99 if dtype == torch.bool else raw.view(dtype)  # any bits, NaN payloads too
    assert_same(through_the_wire(sent), sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        lambda w: w.T,
        lambda w: w[::2],
        lambda w: w[:, 1::3],
        lambda w: w[0, 0],
        lambda w: w[:0],
        lambda w: w.reshape(2, 3, 10, 100).to(memory_format=torch.channels_last),
        lambda w: w[:1].expand(4, 100),
        lambda w: torch.nn.Parameter(w) if w.is_floating_point() else w,
    ],
    ids=["transposed", "strided", "columns", "0-d", "empty", "channels_last", "expanded", "parameter"],
)
def test_every_memory_layout_round_trips(dtype, shape):
    sent = shape(torch.arange(6000).reshape(60, 100).to(dtype))
    assert_same(through_the_wire(sent), sent.detach())


def test_an_array_with_a_negative_stride_is_read_in_its_own_order():
    assert tensor_from_wire("int64", np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]


def test_a_contiguous_tensor_is_not_copied_on_the_way_out():
    sent = torch.zeros(10)
    _, array = tensor_to_wire(sent)
    array[3] = 1
    assert sent[3] == 1


def test_a_decoded_tensor_can_be_written_although_frames_cannot():
    frame = np.frombuffer(bytes(16), np.float32)
    tensor_from_wire("float32", frame).add_(1)
    assert not frame.any()


@pytest.mark.parametrize(
    "name", ["complex64", "float8_e5m2", "torch.float32", "qint8", "__class__", "", None, ["float32"]]
)
def test_an_unknown_dtype_name_is_refused(name):
    with pytest.raises(WireError) as caught:
        tensor_from_wire(name, np.zeros(2, np.float32))
    assert caught.value.code == "BAD_DTYPE"


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("bfloat16", np.zeros(2, np.float32)),
        ("float32", np.zeros(2, np.float64)),
        ("bool", np.zeros(2, np.uint8)),
        ("float32", np.zeros(2, ">f4")),
    ],
)
def test_an_array_of_another_dtype_than_the_name_says_is_refused(name, array):
    with pytest.raises(WireError, match="came as"):
        tensor_from_wire(name, array)


def test_a_complex_tensor_cannot_travel():
    with pytest.raises(WireError, match="complex64 cannot travel"):
        tensor_to_wire(torch.zeros(2, dtype=torch.complex64))
