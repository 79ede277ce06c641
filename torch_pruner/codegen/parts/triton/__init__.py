"""Kernels in the language of Triton: expressions and statements of TIR as operations on tiles."""
