"""OpenDiT: fast, memory-lean training and sampling of Diffusion Transformers on Colossal-AI."""

__version__ = "0.1.0"
