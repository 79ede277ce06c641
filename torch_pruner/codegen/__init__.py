"""Kernel graphs and schedule decisions in, TIR and shared libraries out.

Most of it imports TVM; ``build.load`` needs its runtime alone.
"""
