"""Remembers in the cache, for later processes, what compiling and tuning found out."""
