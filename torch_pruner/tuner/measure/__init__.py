"""Building and timing candidates. ``base.py`` is the seam; ``local.py`` runs it on this machine."""
