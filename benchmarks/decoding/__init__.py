"""Language models one token at a time: ours and the peers, each in a process of its own.

``shapes`` builds the models, a module for each runtime converts and loads them, ``contestants`` is
the list, ``worker`` runs one in a process and ``turns`` times them all in turns.
"""
