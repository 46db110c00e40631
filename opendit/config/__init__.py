"""Flags as frozen dataclasses with ranges and help, recipes, tables of names, and the checks across flags; no torch."""
