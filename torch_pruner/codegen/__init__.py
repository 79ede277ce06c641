"""Kernel graphs and schedule decisions in, TIR and shared libraries out.

The only package that imports TVM.
"""
