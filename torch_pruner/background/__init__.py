"""Compiling beside the user's own work: a queue, and a process of low priority that does the work.

In: graphs of the IR. Out: kernels and libraries in the cache, where whoever asked finds them.
"""
