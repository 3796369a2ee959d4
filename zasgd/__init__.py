"""zasgd: elastic asynchronous training for PyTorch over ZeroMQ with delay compensation."""

__version__ = "0.1.0"
