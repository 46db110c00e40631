"""The networks, their configurations and plans, as plain single-device PyTorch."""
