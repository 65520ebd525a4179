"""What a benchmark leaves: benchmark.csv, a table of each case for people, and the chart, drawn from the CSV alone."""

import csv
import os
from pathlib import Path

from rich.table import Table

from .benchmark_cases import Case
from .benchmark_models import LABELS

COMPETITORS = list(LABELS)
COLUMNS = (
    "case", "competitor", "mode", "precision", "texts", "lengths", "batch_size", "shape", "layers",
    "layer_parameters", "parameters", "real_tokens", "tokens_per_second", "tokens_per_second_q1",
    "tokens_per_second_q3", "seconds", "peak_mib", "ours_over_this", "share_of_bound", "note", "rounds", "device",
    "machine", "threads", "torch", "date",
)  # fmt: skip
COLOURS = {"dsx": "#1f6f8b", "bert": "#b8b8b8", "modernbert": "#8a8a8a", "onnxruntime": "#d9a45b"}


def write_csv(path: Path, rows: list[dict]) -> None:
    """Writes all rows under a temporary name and moves the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def table(case: Case, rows: list[dict]) -> Table:
    """The rows of one case for people."""
    shown = Table("competitor", "layers", "tokens/s", "quartiles", "ours / this", "peak MiB", title=case.name)
    for row in rows:
        shown.add_row(
            LABELS[row["competitor"]] + (f", {row['lengths']} tokens" if case.texts.doubling else ""),
            f"{row['layer_parameters'] / 1e6:.2f}M" if row["layer_parameters"] else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second_q1']:,.0f} - {row['tokens_per_second_q3']:,.0f}",
            f"{row['ours_over_this']:.2f}",
            str(row["peak_mib"]),
        )
    notes = [f"{LABELS[row['competitor']]}: {row['note']}" for row in rows if row["note"]]
    shares = [
        f"bare matrix products: {row['share_of_bound']:.0%} of our time" for row in rows if "share_of_bound" in row
    ]
    shown.caption = "; ".join([f"texts of {rows[0]['lengths']} tokens", *shares[:1], *notes])
    return shown


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
