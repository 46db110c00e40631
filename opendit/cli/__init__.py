"""The console command ``opendit`` and what it starts: the programs under one name. Needs no torch."""
