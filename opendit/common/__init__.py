"""What every other package may use and what needs none of them: files that are whole or absent, strict JSON, imports
that wait until they are needed."""
