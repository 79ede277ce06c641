"""Measurements on a GPU: what ``run.sh`` runs where there is one."""
