"""The shapes of a model's weights, without making one."""

from opendit.common.torch_utils import on_meta
from opendit.models.configuration import DiTConfig
from opendit.models.zoo import build_model

Shapes = dict[str, tuple[int, ...]]


def model_shapes(config: DiTConfig) -> tuple[Shapes, Shapes]:
    """The shapes of a model's parameters and of its buffers; no weight is made. Raises ValueError if there is no such
    model."""
    try:
        with on_meta():
            model = build_model(config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"a model of this configuration can't be built ({str(error).splitlines()[0]})") from error
    parameters, buffers = model.named_parameters(), model.named_buffers()
    return {n: tuple(p.shape) for n, p in parameters}, {n: tuple(b.shape) for n, b in buffers}
