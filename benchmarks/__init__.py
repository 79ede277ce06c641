"""Networks to compile and the measurements that compare this backend with eager and inductor.

Nothing here is part of the installed package. Run from the root of the repository:
``python -m benchmarks.demo``, ``python -m benchmarks.networks``; see ``README.md`` here.
"""
