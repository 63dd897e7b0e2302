"""Curves of a distillation."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from specdec.plots.style import GREY, INK, rc_style


def training_curves(loss: pd.DataFrame, alpha: pd.DataFrame, window: int = 50) -> Figure:
    """Loss, agreement by unrolled step and held-out alpha over training steps.

    loss: columns step, loss, agreement_1, ... alpha: columns step, temperature, alpha. window: steps averaged over.
    """
    import matplotlib as mpl

    with mpl.rc_context(rc_style()):
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        left.plot(loss["step"], loss["loss"], color=GREY, alpha=0.3, linewidth=0.7)
        left.plot(loss["step"], _smooth(loss["loss"], window), color=INK)
        left.set(title=f"training loss (mean of {window} steps)", xlabel="step", ylabel="nats", yscale="log")
        for column in [name for name in loss if str(name).startswith("agreement_")]:
            ahead = str(column).removeprefix("agreement_")
            middle.plot(loss["step"], _smooth(loss[column], window), label=f"{ahead} ahead")
        middle.set(title="most likely token agrees with the target's", xlabel="step", ylabel="share", ylim=(0, 1))
        middle.legend(frameon=False)
        for temperature, group in alpha.groupby("temperature"):
            right.plot(group["step"], group["alpha"], marker="o", label=f"temperature {temperature:g}")
        right.set(title="alpha on held-out prompts", xlabel="step", ylabel="accepted ÷ examined", ylim=(0, 1))
        if len(alpha):
            right.legend(frameon=False)
        for axis in (left, middle, right):
            axis.grid(visible=True)
            axis.spines[["top", "right"]].set_visible(False)
    return figure


def _smooth(values: pd.Series[float], window: int) -> pd.Series[float]:
    return values.rolling(window, min_periods=1).mean()
