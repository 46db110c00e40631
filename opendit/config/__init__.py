"""Flags as frozen dataclasses, recipes, tables of names, and checks across flags. Nothing here imports torch."""
