"""The objectives with their settings, and the samplers, by name.

To add an objective, write ``opendit/diffusion/objectives/NAME.py`` with its class named by ``OBJECTIVE``, and a row in
:data:`DESCRIPTIONS`. To add a sampler, write ``opendit/diffusion/samplers/NAME.py`` with its class named by
``SAMPLER``, and its name in :data:`ALL_SAMPLERS`.
"""

from dataclasses import dataclass

from opendit.config.values import Bounds, Setting

ALL_SAMPLERS = ("ddim", "ddpm", "dpmpp", "euler", "heun")
SHIFT: Bounds = {"at_least": 0.01, "at_most": 100, "unit": "factor"}


@dataclass(frozen=True)
class ObjectiveDescription:
    """An objective as the command line knows it.

    predicts: what the network is trained to predict, for --help. sampler: the sampler that draws from its models by
    default. settings: name of a field of the objective -> the flag that sets it.
    """

    predicts: str
    sampler: str
    settings: dict[str, Setting]


DESCRIPTIONS = {
    "ddpm": ObjectiveDescription(
        "noise and variance (the DiT paper)",
        "ddpm",
        {
            "prediction": Setting(
                "prediction", "eps", "of ddpm: the noise, or v, the velocity", bounds={"choices": ("eps", "v")}
            ),
            "min_snr": Setting(
                "min_snr",
                None,
                "of ddpm: gamma of min-SNR loss weights, usually 5",
                "float",
                {"at_least": 0.001, "at_most": 1e6, "unit": "gamma"},
            ),
            "shift": Setting("ddpm_shift", 1.0, "of ddpm's noise at every timestep, as --flow_shift", bounds=SHIFT),
        },
    ),
    "edm": ObjectiveDescription(
        "a preconditioned denoiser",
        "heun",
        {
            "mean": Setting(
                "edm_mean",
                -1.2,
                "of the log of edm's noise levels in training (P_mean)",
                bounds={"at_least": -10, "at_most": 10, "unit": "number"},
            ),
            "std": Setting(
                "edm_std",
                1.2,
                "their standard deviation (P_std)",
                bounds={"at_least": 0.001, "at_most": 5, "unit": "number"},
            ),
            "sigma_data": Setting(
                "edm_sigma_data",
                0.5,
                "of edm: the standard deviation of what the model learns",
                bounds={"at_least": 0.001, "at_most": 1000, "unit": "number"},
            ),
        },
    ),
    "flow": ObjectiveDescription(
        "velocity",
        "euler",
        {
            "shift": Setting(
                "flow_shift", 1.0, "of flow's times, above 1 to more noise: large pictures, clips", bounds=SHIFT
            ),
            "times_are": Setting(
                "flow_times",
                "uniform",
                "of flow's training samples",
                bounds={"choices": ("uniform", "logit_normal", "mode")},
            ),
            "shift_tokens": Setting(
                "flow_shift_tokens",
                None,
                "samples of so many tokens have --flow_shift, others by the root of theirs",
                "int",
                {"at_least": 1, "at_most": 10**9, "unit": "tokens"},
            ),
        },
    ),
}
