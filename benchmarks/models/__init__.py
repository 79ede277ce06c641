"""The networks of the Pruner paper, built from shapes with random weights."""

from benchmarks.models.network import PRECISIONS, Inputs, Network
from benchmarks.models.registry import NETWORKS, call, load

__all__ = ["NETWORKS", "PRECISIONS", "Inputs", "Network", "call", "load"]
