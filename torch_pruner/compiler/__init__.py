"""Graph in, callable program out: where graph, tuner, code generation and cache meet.

Imports no torch.
"""
