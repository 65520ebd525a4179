"""The chart of a benchmark, drawn from its CSV alone."""

import csv
from pathlib import Path

from .benchmark_models import LABELS

COLOURS = {"dsx": "#1f6f8b", "bert": "#b8b8b8", "modernbert": "#8a8a8a", "onnxruntime": "#d9a45b"}


def draw_chart(path: str | Path) -> Path:
    """Real tokens a second of every competitor, stock BERT in each case = 1; benchmark.png beside the CSV."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file: run the benchmark first, or name its folder as --output_dir")
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    cases = {}
    for row in rows:
        if row["competitor"] in COLOURS:
            cases.setdefault(row["case"], {})[row["competitor"]] = row
    cases = {name: entries for name, entries in cases.items() if "bert" in entries}
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.62 * max(len(cases), 1)))
    height = 0.8 / len(COLOURS)
    for position, entries in enumerate(cases.values()):
        reference = float(entries["bert"]["tokens_per_second"])
        for index, (name, colour) in enumerate(COLOURS.items()):
            if name not in entries:
                continue
            value, low, high = (
                float(entries[name][f"tokens_per_second{part}"]) / reference for part in ("", "_q1", "_q3")
            )
            place = position + (index - (len(COLOURS) - 1) / 2) * height
            error = [[max(value - low, 0)], [max(high - value, 0)]]
            label = LABELS[name] if name not in axes.get_legend_handles_labels()[1] else None
            axes.barh(place, value, height, xerr=error, color=colour, label=label, error_kw={"lw": 0.7})
            if name == "dsx":
                axes.text(max(value, high), place, f" {value:.1f}x", va="center", fontsize=8)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel("real tokens per second, stock BERT = 1 (median over rounds, bars: quartiles)")
    first = rows[0]
    axes.set_title(
        f"{first['machine']}, {first['threads']} threads, torch {first['torch']}, {first['date']}", fontsize=9
    )
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, loc="lower right")
    target = path.with_name("benchmark.png")
    temporary = path.with_name(".benchmark.part.png")
    figure.tight_layout()
    figure.savefig(temporary, dpi=130)
    pyplot.close(figure)
    temporary.replace(target)
    return target
