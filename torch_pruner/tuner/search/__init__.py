"""Search strategies. ``base.py`` is the seam."""
