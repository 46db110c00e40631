"""Import everything that ranks need. Ranks are forked from a process that has imported this module (tests/ranks.py)."""

import atexit
import gc

gc.disable()  # each collection would visit all imported objects

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import torchvision  # noqa: F401
from diffusers import AutoencoderKL  # noqa: F401

import benchmarks.plain_dit  # noqa: F401  (timm)
import opendit.sampling.sample_output
import opendit.training.build  # noqa: F401
import preprocess  # noqa: F401
import sample  # noqa: F401
import train  # noqa: F401
from opendit.parallel.colossal import load
from tests.kernels import conftest  # noqa: F401  (Triton's interpreter, mended also in ranks)

load()
gc.enable()
gc.freeze()  # otherwise collections in every rank would visit all imported objects
atexit.register(gc.unfreeze)  # otherwise Triton's bindings report leaks at exit
