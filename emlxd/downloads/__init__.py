"""Where model files are downloaded from, and the cache that holds them. ``emlxd.sources`` is the way in."""
