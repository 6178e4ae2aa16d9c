"""Image of a run with rewards: rewards, entropy, divergences, lengths, and groups that teach nothing."""

from pathlib import Path

from eqx_decoders.training.run.log import new_figure, read_metrics, series_of


PANELS = {  # title: its figures by their names in metrics.jsonl
    "reward": {
        "reward": "drawn",
        "eval_reward": "held-out, drawn",
        "eval_reward_greedy": "held-out, most likely",
    },
    "entropy (nats per token)": {"entropy": "entropy"},
    "divergence": {"k3": "from the reference (k3)", "log_prob_gap": "|trainer - sampler|"},
    "critic": {"explained_variance": "explained variance", "value_loss": "loss"},
    "tokens of an answer": {"answer_tokens_better": "better ones", "answer_tokens_worse": "worse ones"},
    "share of": {"constant_groups": "groups with one reward", "truncated": "answers cut", "clip": "tokens clipped"},
}


def plot_rewards(metrics_path: str | Path, out_png: str | Path) -> None:
    """Draw the figures of a run's rows over its steps."""
    rows = read_metrics(metrics_path)
    has_critic = len(series_of(rows, "value_loss")[0]) > 0
    shown = {title: names for title, names in PANELS.items() if has_critic or title != "critic"}
    figure, write = new_figure(8, 2 * len(shown))
    panels = figure.subplots(len(shown), sharex=True)
    for axes, (title, names) in zip(panels, shown.items(), strict=True):
        for number, (name, label) in enumerate(names.items()):
            steps, values = series_of(rows, name)
            style = "o-" if name.startswith("eval_") else "-"
            if len(steps):
                axes.plot(steps, values, style, color=f"C{number}", markersize=4, linewidth=1.2, label=label)
        axes.set_ylabel(title)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
        if axes.lines:
            axes.legend(loc="best", fontsize="small")
    panels[-1].set_xlabel("step (updates of the weights)")
    write(out_png)
