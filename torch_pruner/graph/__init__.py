"""Tensor programs as data: the graph IR, its passes, and fusion. Imports neither torch nor TVM."""
