"""Helpers that every package may use and that import none of them: files that are written whole or not at all, strict
JSON, and imports that wait until they are needed."""
