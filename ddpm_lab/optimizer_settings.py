"""How the weights are updated and averaged."""

from __future__ import annotations

from dataclasses import dataclass

from ddpm_lab.checks import ConfigError, choice, number, several, whole

ADAMS = ("fused", "foreach", "loop")
EMAS = ("foreach", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Adam, gradient clipping and the exponential moving average of the weights.

    ``adam`` and ``ema`` say how these are computed, never what: in one kernel for all weights (fused), one for each
    operation (foreach), or weight by weight (loop). With ``ema_warmup`` the n-th update decays by (1 + n) / (10 + n)
    while that is less than ``ema_decay``, so that the average soon forgets the initial weights (the rule of
    tf.train.ExponentialMovingAverage).
    """

    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.99)
    clip_norm: float | None = 1.0
    ema_decay: float = 0.995
    ema_every: int = 10
    ema_warmup: bool = True
    adam: str = "fused"
    ema: str = "foreach"

    def __post_init__(self) -> None:
        several("optimizer.betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))
        if not (number(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate!r}: give a finite number above 0")
        if len(self.betas) != 2 or not all(number(b) and 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas!r}: give two numbers in [0, 1)")
        if (clip := self.clip_norm) is not None and not (number(clip) and clip > 0):
            raise ConfigError(f"optimizer.clip_norm is {clip!r}: give a finite number above 0, or null for none")
        if not (number(self.ema_decay) and 0 <= self.ema_decay < 1):
            raise ConfigError(f"optimizer.ema_decay is {self.ema_decay!r}: give a number in [0, 1)")
        whole("optimizer.ema_every", self.ema_every, 1)
        choice("optimizer.ema_warmup", self.ema_warmup, (True, False))
        choice("optimizer.adam", self.adam, ADAMS)
        choice("optimizer.ema", self.ema, EMAS)

    def decay_at(self, update: int) -> float:
        """The decay of the averages at their n-th update, counted from 1."""
        return min(self.ema_decay, (1 + update) / (10 + update)) if self.ema_warmup else self.ema_decay
