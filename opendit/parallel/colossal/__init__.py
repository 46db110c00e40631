"""The only modules that import colossalai: what it needs mended, its ZeRO optimizer, its plugins."""
