"""The flags of train.py by which a run is measured while it trains."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.cli.command_line import Flags, flag
from opendit.cli.evaluate_flags import EvaluateConfig
from opendit.cli.values import FROM_0, GUIDANCE, SAMPLING_STEPS, SHARE
from opendit.evaluation.names import DIGITS, METRICS


@dataclass(frozen=True)
class ValidationFlags(Flags):
    """The loss on samples that are not trained on."""

    group: ClassVar[str] = "Validation: the loss on samples that are not trained on"

    validate_every: int | None = flag(
        None,
        "steps between losses of the EMA weights on held-out samples (default: as --ckpt_every)",
        unit="steps",
        **FROM_0,
    )
    validate_path: str | None = flag(
        None, "those samples, as --data_path takes them (digits: its test split)", unit="data"
    )
    validate_share: float = flag(0.0, "hold this share of --data_path out of training, and validate on it", **SHARE)
    validate_samples: int | None = flag(
        None,
        "losses that are averaged (default: at most 1,000, and few enough to cost little)",
        at_least=10,
        at_most=10_000_000,
        unit="losses",
    )

    @property
    def validates(self) -> bool:
        return self.validate_path is not None or self.validate_share > 0


@dataclass(frozen=True)
class EvaluationFlags(Flags):
    """How good samples of the EMA weights are."""

    group: ClassVar[str] = "Evaluation: how good samples of the EMA weights are"

    evaluate_every: int = flag(0, "steps between evaluations of a few samples; 0: none", unit="steps", **FROM_0)
    evaluate_samples: int = flag(
        1000, "samples that are drawn for each of them", unit="samples", at_least=20, at_most=10_000_000
    )
    evaluate_metrics: list[str] = flag(
        [], "as --metrics of opendit evaluate; all that can be computed when left out", choices=tuple(METRICS)
    )
    evaluate_reference: str | None = flag(None, "as --reference of opendit evaluate", unit="data")
    evaluate_features: str | None = flag(None, "as --features of opendit evaluate: digits, or a network", unit="file")
    evaluate_video_features: str | None = flag(None, "as --video_features of opendit evaluate", unit="file")
    evaluate_steps: int = flag(50, "denoising steps of those samples", **SAMPLING_STEPS)
    evaluate_cfg_scale: float = flag(1.5, "guidance of those samples; 1: off", **GUIDANCE)

    def evaluating(self) -> EvaluateConfig:
        """What ``opendit evaluate`` would be given to measure the samples of --evaluate_every."""
        how = {
            "features": self.evaluate_features,
            "video_features": self.evaluate_video_features,
            "reference": self.evaluate_reference or (DIGITS if self.evaluate_features == DIGITS else None),
            "metrics": self.evaluate_metrics,
        }
        return EvaluateConfig(**how, intervals=False, given=frozenset(how))
