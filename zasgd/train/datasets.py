"""The shipped data sets, and how any map-style data set becomes batches.

Decides where data is looked for, how it is split and normalised; never shuffles, and never downloads what it
can read from disk.
"""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from zasgd.core.ledger import permutation
from zasgd.train import DataError

Array = np.ndarray[Any, Any]

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its four files."""

_DIGITS_TRAIN = 1297
_FASHION_MEAN, _FASHION_STD = 0.2860, 0.3530  # of the 60,000 training images, pixels as 0..1


# ---- batches -----------------------------------------------------------------------------------------


def take(data: Any, indices: Array, seed_of: Callable[[int], int] | None = None) -> Any:
    """The samples at `indices` (int64) as one batch, usually (inputs, targets).

    A TensorDataset, or any data set with a method `take(indices: Tensor)`, is indexed at once; others sample
    by sample and through torch's default_collate. `seed_of(index)` then seeds torch's and Python's generators
    before a sample is read, so that an augmentation depends on the sample and not on who computes it.
    """
    if isinstance(data, TensorDataset):
        return tuple(tensor[torch.from_numpy(indices)] for tensor in data.tensors)
    if hasattr(data, "take"):
        return data.take(torch.from_numpy(indices))
    samples = []
    for index in indices.tolist():
        if seed_of is not None:
            torch.default_generator.manual_seed(seed_of(index))
            random.seed(seed_of(index))
        samples.append(data[index])
    return default_collate(samples)


def in_order(data: Any, batch_size: int, at_most: int | None = None) -> Iterator[Any]:
    """The first `at_most` samples (default all) as consecutive batches."""
    stop = len(data) if at_most is None else min(at_most, len(data))
    for start in range(0, stop, batch_size):
        yield take(data, np.arange(start, min(start + batch_size, stop)))


class ImageTensors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Grey images kept as uint8 (n, height, width), normalised when taken: float32 (batch, 1, h, w)."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean: float, std: float) -> None:
        self.images, self.labels, self.mean, self.std = images, labels, mean, std

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self.take(torch.tensor([index]))
        return inputs[0], labels[0]

    def take(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One normalised batch and its int64 labels."""
        pixels = self.images[indices].unsqueeze(1).float()
        return pixels.div_(255.0).sub_(self.mean).div_(self.std), self.labels[indices]


# ---- scikit-learn's digits -----------------------------------------------------------------------------


def digits(split_seed: int = 0, train_limit: int = 0, test_limit: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 digits of 8x8 pixels as (64,) float32, standardised by the 1,297 training ones.

    train_limit, test_limit: how many of the 1,297 and 500 to keep, 0 for all; the scale stays. Raises DataError.
    """
    table = _digits_table()
    order = permutation(len(table), split_seed, 0)
    pixels, labels = table[order, :-1].astype(np.float32), table[order, -1].astype(np.int64)
    mean, std = pixels[:_DIGITS_TRAIN].mean(axis=0), pixels[:_DIGITS_TRAIN].std(axis=0)
    inputs = torch.from_numpy((pixels - mean) / np.where(std > 0, std, 1).astype(np.float32))
    targets = torch.from_numpy(labels)
    num_test = len(table) - _DIGITS_TRAIN
    _check_limit("train_limit", train_limit, _DIGITS_TRAIN)
    _check_limit("test_limit", test_limit, num_test)
    train = slice(0, train_limit or _DIGITS_TRAIN)
    test = slice(_DIGITS_TRAIN, _DIGITS_TRAIN + (test_limit or num_test))
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test])


def _digits_table() -> Array:
    """(1797, 65): pixels, then the label; from scikit-learn's file, as importing it takes over a second."""
    spec = importlib.util.find_spec("sklearn")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return np.column_stack([loaded.data, loaded.target])


# ---- Fashion-MNIST ---------------------------------------------------------------------------------------


def fashion_mnist(
    folder: str = "",
    download_to: str = "~/.cache/zasgd",
    train_limit: int = 0,
    test_limit: int = 0,
    split_seed: int = 0,
) -> tuple[ImageTensors, ImageTensors]:
    """The 60,000 and 10,000 images of 28x28 from `folder`, else Debian's package, else torchvision.

    `folder` holds the four idx files, gzipped or not. train_limit, test_limit: how many to keep, 0 for all, the first
    in an order that depends on split_seed alone. Raises DataError.
    """
    found = _fashion_folder(folder, download_to)
    train, test = _fashion_part(found, "train"), _fashion_part(found, "t10k")
    return _limited(train, "train_limit", train_limit, split_seed), _limited(test, "test_limit", test_limit, split_seed)


def _limited(part: ImageTensors, key: str, limit: int, split_seed: int) -> ImageTensors:
    _check_limit(key, limit, len(part))
    if not limit:
        return part
    kept = torch.from_numpy(permutation(len(part), split_seed, 0)[:limit])
    return ImageTensors(part.images[kept], part.labels[kept], part.mean, part.std)


def _check_limit(key: str, limit: int, available: int) -> None:
    if type(limit) is not int or not 0 <= limit <= available:
        raise DataError(f"data.args.{key} is {limit!r}, but should be 0 for all or a number up to {available}")


def _fashion_part(folder: Path, part: str) -> ImageTensors:
    images = torch.from_numpy(_part_file(folder, part, "images-idx3"))
    labels = torch.from_numpy(_part_file(folder, part, "labels-idx1").astype(np.int64))
    if len(images) != len(labels) or images.dim() != 3:
        raise DataError(f"{folder}: the {part} images and labels do not belong together")
    return ImageTensors(images, labels, _FASHION_MEAN, _FASHION_STD)


def _part_file(folder: Path, part: str, kind: str) -> Array:
    for suffix in ("ubyte.gz", "ubyte"):
        path = folder / f"{part}-{kind}-{suffix}"
        if path.is_file():
            return read_idx(path)
    raise DataError(f"{folder}: there is no {part}-{kind}-ubyte.gz in it")


def _fashion_folder(folder: str, download_to: str) -> Path:
    if folder:
        return Path(folder).expanduser()
    if DEBIAN_FASHION.is_dir():
        return DEBIAN_FASHION
    try:
        return _downloaded(Path(download_to).expanduser())
    except (ImportError, OSError, RuntimeError) as e:
        raise DataError(
            "Fashion-MNIST is not here: install Debian's package dataset-fashion-mnist, or give the folder "
            "of its four idx files as data.args.folder, or let torchvision download it (that failed: "
            f"{_one_line(e)})"
        ) from e


def _downloaded(folder: Path) -> Path:
    from torchvision.datasets import FashionMNIST  # seconds to import, so only here

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fashion-mnist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a run all come here at once
        FashionMNIST(str(folder), train=True, download=True)
    return folder / "FashionMNIST" / "raw"


def read_idx(path: Path) -> Array:
    """The uint8 array in an idx file, gzipped or not. Raises DataError if it is none."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, num_axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{num_axes}I", raw, 4)
        if (zeros, kind) != (0, 8):
            raise DataError(f"{path}: not an idx file of bytes")
        return np.frombuffer(bytearray(raw), np.uint8, offset=4 + 4 * num_axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as e:
        raise DataError(f"{path}: cannot be read as an idx file: {_one_line(e)}") from e


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


DATASETS: dict[str, Callable[..., Any]] = {"digits": digits, "fashion-mnist": fashion_mnist}
"""Shipped name -> factory, for `data.factory`."""
