"""A processor with fewer instructions than this one has, for every contestant alike."""
