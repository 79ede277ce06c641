"""Kernels for GPUs: the same kernel graphs, readers and epilogues as on CPUs, laid on a grid.

Every emitter is written against ``grid.Grid``, which also lays the same schedule out as loops on
the host: that is how its numbers are checked where there is no GPU.
"""
