"""The picture of a training run: loss and acceptance over steps, one line a TTT step.

train_drafter.py redraws OUT/curves.png at each evaluation from the lines of metrics.jsonl.
"""

import contextlib
import os
from pathlib import Path

SMOOTHING = 20  # the loss lines are running means over about so many logged steps


def draw_curves(lines: list[dict], path: Path, title: str) -> None:
    """lines: as `training_log.read_metrics` gives them.  path: the PNG, replaced atomically; OSError where the disk
    does not take it, with the old picture kept.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    training = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.5), constrained_layout=True)
    colours = pyplot.get_cmap("viridis")
    num_steps = len(training[0]["loss_per_step"]) if training else 0
    steps = [line["step"] for line in training]
    for k in range(num_steps):
        left.plot(steps, running_mean([line["loss_per_step"][k] for line in training]),
                  color=colours(k / max(num_steps, 2)), label=f"TTT step {k}")  # fmt: skip
    left.set(title="training loss", xlabel="optimizer step", ylabel="cross-entropy to the target (nats)")
    eval_steps = [line["step"] for line in evaluations]
    for k in range(len(evaluations[0]["cumulative"]) if evaluations else 0):
        middle.plot(eval_steps, [line["cumulative"][k] for line in evaluations], marker="o", markersize=3,
                    color=colours(k / max(len(evaluations[0]["cumulative"]), 2)), label=f"A_{k}")  # fmt: skip
    middle.set(title="held-out cumulative acceptance", xlabel="optimizer step", ylim=(0, 1))
    right.plot(eval_steps, [line["tau"] for line in evaluations], marker="o", markersize=3, color="tab:red")
    right.set(title="held-out acceptance length tau (walked)", xlabel="optimizer step", ylabel="tokens per cycle")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    for axes, shown in ((left, training), (middle, evaluations)):
        if shown:
            axes.legend(fontsize=7)
    figure.suptitle(title)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.png")
    try:
        figure.savefig(temporary, dpi=110)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        pyplot.close(figure)


def running_mean(values: list[float | None]) -> list[float]:
    """Exponential running mean, unbiased at its beginning; None leaves it as it is."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if value is not None:
            total = total * (1 - 1 / SMOOTHING) + value / SMOOTHING
            weight = weight * (1 - 1 / SMOOTHING) + 1 / SMOOTHING
        out.append(total / weight if weight else float("nan"))
    return out
