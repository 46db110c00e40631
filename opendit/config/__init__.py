"""Flags as frozen dataclasses with ranges and help, recipes, tables of names, and checks across flags. No torch."""
