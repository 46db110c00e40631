"""The console command ``opendit``. Importing this package does not import torch."""
