"""Data: what is read, how it is split, and what is said when it is not there."""

from __future__ import annotations

import gzip
import struct
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from zasgd.core.ledger import permutation
from zasgd.train import DataError, datasets
from zasgd.train.datasets import DEBIAN_FASHION, digits, fashion_mnist, in_order, read_idx, take

ALL_DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
"""How often each digit occurs among the 1,797."""


def write_idx(path, array: np.ndarray, kind: int = 8) -> None:
    raw = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def folder(tmp_path):
    """A Fashion-MNIST of 6 and 4 images, one pair gzipped and one not."""
    rng = np.random.default_rng(0)
    for part, count, suffix in (("train", 6, ".gz"), ("t10k", 4, "")):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count, dtype=np.uint8))
    return tmp_path


def test_digits_are_split_for_good_and_standardised_by_the_training_part():
    train, test = digits()
    assert (len(train), len(test)) == (1297, 500)
    inputs, targets = train.tensors
    assert (inputs.dtype, inputs.shape[1], targets.dtype) == (torch.float32, 64, torch.int64)
    varying = inputs.std(dim=0) > 0
    np.testing.assert_allclose(inputs.mean(dim=0), 0, atol=1e-5)
    np.testing.assert_allclose(inputs[:, varying].std(dim=0, unbiased=False), 1, rtol=1e-4)
    assert torch.equal(digits()[1].tensors[0], test.tensors[0])
    assert targets.bincount().add(test.tensors[1].bincount()).tolist() == ALL_DIGITS
    assert not torch.equal(digits(split_seed=1)[1].tensors[1], test.tensors[1])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    table, theirs = datasets._digits_table(), load_digits()
    np.testing.assert_array_equal(table[:, :-1], theirs.data)
    np.testing.assert_array_equal(table[:, -1], theirs.target)


def test_fashion_mnist_is_read_from_a_folder_gzipped_or_not(folder):
    train, test = fashion_mnist(str(folder))
    assert (len(train), len(test)) == (6, 4)
    inputs, labels = train.take(torch.tensor([5, 0]))
    assert (inputs.shape, inputs.dtype, labels.tolist()) == ((2, 1, 28, 28), torch.float32, [5, 0])
    expected = (train.images[5].double() / 255 - 0.2860) / 0.3530
    np.testing.assert_allclose(inputs[0, 0], expected, rtol=1e-5, atol=1e-6)
    one, label = train[5]
    assert torch.equal(one, inputs[0])
    assert label == 5


@pytest.mark.skipif(not DEBIAN_FASHION.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_images_are_normalised_to_mean_0_and_deviation_1():
    train, test = fashion_mnist()
    assert (len(train), len(test)) == (60000, 10000)
    inputs, labels = train.take(torch.arange(60000))
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3
    assert labels.bincount().tolist() == [6000] * 10


def test_a_limit_keeps_the_first_of_an_order_that_the_split_seed_alone_decides(folder):
    whole, _ = fashion_mnist(str(folder))
    few, test = fashion_mnist(str(folder), train_limit=4, test_limit=3)
    assert (len(few), len(test)) == (4, 3)
    order = permutation(6, 0, 0)[:4]
    assert few.labels.tolist() == whole.labels[order].tolist() != [0, 1, 2, 3]
    assert torch.equal(few.images, whole.images[order])
    assert fashion_mnist(str(folder), train_limit=2)[0].labels.tolist() == few.labels[:2].tolist()
    seeds = [fashion_mnist(str(folder), train_limit=4, split_seed=seed)[0].labels.tolist() for seed in range(4)]
    assert len({tuple(labels) for labels in seeds}) > 1


def test_limited_digits_are_the_first_of_all_of_them():
    whole, few = digits(), digits(train_limit=100, test_limit=7)
    for all_of_it, part, count in zip(whole, few, (100, 7), strict=True):
        assert len(part) == count
        assert all(torch.equal(p, a[:count]) for p, a in zip(part.tensors, all_of_it.tensors, strict=True))


@pytest.mark.parametrize("limit", [-1, 7, 2.0, True, "many"])
def test_a_limit_that_cannot_be_is_named_with_what_can(folder, limit):
    with pytest.raises(DataError, match=r"data\.args\.train_limit is .*, but should be 0 for all or a number up to 6"):
        fashion_mnist(str(folder), train_limit=limit)
    with pytest.raises(DataError, match=r"data\.args\.test_limit is 501, but should be .* up to 500"):
        digits(test_limit=501)


def test_a_folder_without_the_files_is_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no train-images-idx3-ubyte\.gz"):
        fashion_mnist(str(tmp_path))


def test_when_no_way_works_all_three_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "absent")
    (tmp_path / "file").write_text("in the way of the download's folder")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match="torchvision"):
        fashion_mnist(download_to=str(tmp_path / "empty"))
    monkeypatch.undo()
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "absent")
    with pytest.raises(DataError) as caught:
        fashion_mnist(download_to=str(tmp_path / "file"))
    for words in ("dataset-fashion-mnist", "data.args.folder", "torchvision"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"not gzip"),
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(gzip.compress(b"")),
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1])),
        lambda path: write_idx(path, np.zeros((2, 2), np.float32), kind=13),
    ],
    ids=["no gzip", "cut gzip", "empty", "one byte short", "floats"],
)
def test_a_spoiled_idx_file_is_named(tmp_path, spoil):
    path = tmp_path / "some.gz"
    write_idx(path, np.zeros((3, 4), np.uint8))
    assert read_idx(path).shape == (3, 4)
    spoil(path)
    with pytest.raises(DataError, match=str(path)):
        read_idx(path)


def test_tensors_are_indexed_at_once_and_other_data_sets_sample_by_sample():
    inputs, targets = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    at_once = take(TensorDataset(inputs, targets), np.array([7, 1]))
    one_by_one = take([(inputs[i], int(targets[i])) for i in range(10)], np.array([7, 1]))
    for batch in (at_once, one_by_one):
        assert torch.equal(batch[0], inputs[[7, 1]])
        assert batch[1].tolist() == [7, 1]


def test_batches_in_order_cover_every_sample_once():
    data = TensorDataset(torch.arange(10))
    assert [batch[0].tolist() for batch in in_order(data, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch[0]) for batch in in_order(data, 4, at_most=5)] == [4, 1]
