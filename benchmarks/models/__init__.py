"""The networks of the Pruner paper, built from shapes with random weights."""

from benchmarks.models.registry import NETWORKS, PRECISIONS, Inputs, Network, call, load

__all__ = ["NETWORKS", "PRECISIONS", "Inputs", "Network", "call", "load"]
