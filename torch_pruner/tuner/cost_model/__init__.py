"""Cost models: they rank candidates, to draft and to verify. ``base.py`` is the seam."""
