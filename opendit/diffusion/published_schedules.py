"""Schedules of public models: the objective and sampler that a scheduler's configuration in diffusers describes.

A published folder has the configuration in ``scheduler/scheduler_config.json``. Two schedulers of flow models are
supported. FlowMatchEulerDiscreteScheduler (FLUX, Qwen-Image, Z-Image) takes its times from the pipeline, evenly spaced
from 1 to 1 / steps. UniPCMultistepScheduler (Wan) needs ``use_flow_sigmas``. diffusers need not be installed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from opendit.diffusion.objectives.flow import FlowObjective


class PublishedSchedule(NamedTuple):
    """The objective and the sampler of a public model.

    objective: the objective with its shift. If the shift depends on the number of tokens, ``for_tokens`` computes the
    shift. sampler: name of the sampler that the model's own pipeline uses.
    """

    objective: FlowObjective
    sampler: str


# Settings for which only one value is supported, which is the default in diffusers 0.42.1.
ALWAYS = {"num_train_timesteps": 1000}
CURVES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
EULER_ONLY = {**ALWAYS, **CURVES, "invert_sigmas": False, "stochastic_sampling": False}
UNIPC_ONLY: dict[str, Any] = {
    **ALWAYS,
    **CURVES,
    "solver_order": 2,
    "solver_type": "bh2",
    "solver_p": None,
    "predict_x0": True,
    "thresholding": False,
    "lower_order_final": True,
    "disable_corrector": [],
    "final_sigmas_type": "zero",
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}
EULER_READ = {
    "shift",
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "shift_terminal",
    "time_shift_type",
}
UNIPC_READ = {"prediction_type", "use_flow_sigmas", "flow_shift"}
# Settings that have no effect for flows: they belong to other models' noise schedules, or to options that ALWAYS turns
# off.
UNIPC_UNUSED = {
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
    "timestep_spacing",
    "steps_offset",
    "sigma_min",
    "sigma_max",
    "dynamic_thresholding_ratio",
    "sample_max_value",
    "time_shift_type",
}

# Settings without effect in pipelines that set Karras' noise levels themselves.
KARRAS_UNUSED = {"use_karras_sigmas", "sigma_min", "sigma_max", "sigma_data", "final_sigmas_type"}


def published_schedule(config: Mapping[str, Any], shifted_end: bool = False, karras: bool = False) -> PublishedSchedule:
    """Convert a scheduler's configuration, as in ``scheduler_config.json``. shifted_end, karras: see ``Family``.

    Raises ValueError that names the setting if it is not supported. Unknown settings are accepted if they are off
    (false, null, 0 or empty), because newer versions of diffusers write them.
    """
    name = config.get("_class_name")
    if name not in READERS:
        raise ValueError(f"_class_name {name!r}: not supported; give {' or '.join(READERS)}")
    if karras:
        if config.get("use_karras_sigmas") is not True:
            raise ValueError(f"use_karras_sigmas {config.get('use_karras_sigmas')!r}: not supported; give true")
        config = {key: value for key, value in config.items() if key not in KARRAS_UNUSED}
    found = READERS[name](config)
    objective = found.objective
    if karras:
        if objective != FlowObjective():
            raise ValueError(f"_class_name {name!r}: for this pipeline only a shift of 1 is supported")
        return found._replace(objective=replace(objective, karras=True))
    if not shifted_end:
        return found
    if objective.discrete_times or objective.shift_tokens is not None or objective.shift_terminal is not None:
        raise ValueError(f"_class_name {name!r}: for this pipeline only a fixed shift is supported")
    return found._replace(objective=replace(objective, shifted_end=True))


def _euler(config: Mapping[str, Any]) -> PublishedSchedule:
    _check(config, EULER_ONLY, EULER_READ)
    terminal = _number(config, "shift_terminal", 0.0) if config.get("shift_terminal") is not None else 0.0
    if not 0 <= terminal < 1:
        raise ValueError(f"shift_terminal {terminal:g}: out of range; give a number from 0 to 1")
    common: dict[str, Any] = {"shift_terminal": terminal or None}
    if not config.get("use_dynamic_shifting", False):
        return PublishedSchedule(FlowObjective(_shift(config, "shift"), **common), "euler")
    if (law := config.get("time_shift_type", "exponential")) != "exponential":
        raise ValueError(f"time_shift_type {law!r}: not supported; give 'exponential'")
    # mu is linear in the number of tokens, as in calculate_shift of the pipelines. The shift is e^mu.
    least, most = (_number(config, key, mu) for key, mu in (("base_shift", 0.5), ("max_shift", 1.15)))
    for key, mu in (("base_shift", least), ("max_shift", most)):
        if abs(mu) > 10:
            raise ValueError(f"{key} {mu:g}: out of range; give a number from -10 to 10")
    few, many = (_number(config, key, n) for key, n in (("base_image_seq_len", 256), ("max_image_seq_len", 4096)))
    if not 1 <= few < many or few != int(few):
        raise ValueError(f"base_image_seq_len {few:g}: out of range; give a whole number below max_image_seq_len")
    growth = (most - least) / (many - few)
    dynamic = FlowObjective(math.exp(least), shift_tokens=int(few), shift_growth=growth, **common)
    return PublishedSchedule(dynamic, "euler")


def _unipc(config: Mapping[str, Any]) -> PublishedSchedule:
    _check(config, UNIPC_ONLY, UNIPC_READ | UNIPC_UNUSED)
    for key, value, default in (("prediction_type", "flow_prediction", "epsilon"), ("use_flow_sigmas", True, False)):
        if (found := config.get(key, default)) != value:
            raise ValueError(f"{key} {found!r}: not supported; give {value!r}")
    return PublishedSchedule(FlowObjective(_shift(config, "flow_shift"), discrete_times=True), "unipc")


READERS: dict[str, Callable[[Mapping[str, Any]], PublishedSchedule]] = {
    "FlowMatchEulerDiscreteScheduler": _euler,
    "UniPCMultistepScheduler": _unipc,
}


def _check(config: Mapping[str, Any], only: Mapping[str, Any], read: set[str]) -> None:
    """Raise ValueError if a setting differs from its value in ``only``, or if an unknown setting is on."""
    for key, value in config.items():
        if key in only:
            if value != only[key] and (value or only[key]):  # null, false and empty all mean off
                raise ValueError(f"{key} {value!r}: not supported; give {only[key]!r}")
        elif key not in read and not key.startswith("_") and value:
            raise ValueError(f"{key} {value!r}: not known to this version")


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} {value!r}: not a number")
    return float(value)


def _shift(config: Mapping[str, Any], key: str) -> float:
    value = _number(config, key, 1.0)
    if value <= 0:
        raise ValueError(f"{key} {value:g}: out of range; give a number above 0")
    return value
