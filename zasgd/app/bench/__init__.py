"""Measurements of this machine. Each figure stands beside a physical limit measured in the same run, in turns."""

from zasgd.app.bench.crew import BenchError
from zasgd.app.bench.kernels import kernels
from zasgd.app.bench.roundtrip import roundtrip
from zasgd.app.bench.scale import scale
from zasgd.app.bench.step import step, summary

__all__ = ["BenchError", "kernels", "roundtrip", "scale", "step", "summary"]
