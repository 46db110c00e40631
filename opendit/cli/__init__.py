"""The console command ``opendit``, which starts all programs. Importing it does not import torch."""
