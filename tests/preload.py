"""What ranks would else import one by one; they are forked from a process that has imported this (tests/ranks.py)."""

import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import torchvision  # noqa: F401

import opendit.inference.run
import opendit.training.build  # noqa: F401
from opendit.parallel.colossal import load

load()
