"""acceptance.png: how far each drafter's guesses are accepted, step by step, with intervals. Called by
eval_acceptance.py."""

from __future__ import annotations

from pathlib import Path


def draw(path: Path, results: list[dict], title: str) -> None:
    """Two panels over draft steps, one line a drafter: accepted through step k, and conditional acceptance at step k.

    results: [{"name": ..., "summary": AcceptanceCounts.summary()}]; steps without an observation are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    panels = [("cumulative", "accepted through step k"), ("conditional", "accepted at step k, given all before")]
    colours = [f"C{i % 10}" for i in range(len(results))]
    for axis, (name, label) in zip(axes, panels, strict=True):
        for number, (result, colour) in enumerate(zip(results, colours, strict=True)):
            summary = result["summary"]
            values, bounds = summary[name], summary[f"{name}_95"]
            steps = [k for k, v in enumerate(values) if v is not None]
            offset = 0.08 * (number - (len(results) - 1) / 2)  # side by side, so that intervals stay readable
            x = [k + offset for k in steps]
            y = [values[k] * 100 for k in steps]
            low = [max(0.0, y[i] - bounds[k][0] * 100) if bounds and bounds[k] else 0.0 for i, k in enumerate(steps)]
            high = [max(0.0, bounds[k][1] * 100 - y[i]) if bounds and bounds[k] else 0.0 for i, k in enumerate(steps)]
            tau = "-" if summary["tau"] is None else f"{summary['tau']:.2f}"
            axis.errorbar(x, y, yerr=[low, high], color=colour, marker="o", capsize=3, lw=1.5,
                          label=f"{result['name']} (tau {tau})")  # fmt: skip
        axis.set_xlabel("draft step k")
        axis.set_title(label, fontsize=10)
        axis.set_xticks(range(max(len(result["summary"][name]) for result in results)))
        axis.set_ylim(0, 102)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of positions")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
