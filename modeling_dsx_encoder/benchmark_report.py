"""What a benchmark leaves: benchmark.csv, a table of each case for people, and the chart, drawn from the CSV alone."""

import csv
import fnmatch
import os
from pathlib import Path

from rich import box
from rich.table import Table

from .benchmark_cases import Case
from .benchmark_models import LABELS

COMPETITORS = list(LABELS)
COLUMNS = (
    "case", "competitor", "mode", "precision", "texts", "lengths", "batch_size", "shape", "layers",
    "layer_parameters", "parameters", "real_tokens", "tokens_per_second", "tokens_per_second_q1",
    "tokens_per_second_q3", "seconds", "peak_mib", "ours_over_this", "share_of_bound", "note", "rounds", "device",
    "machine", "threads", "load_average", "torch", "date",
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


def summary(rows: list[dict]) -> Table:
    """Ratios of all cases as a table in Markdown: speed over each peer, share of the bound, memory beside BERT's."""
    peers = ("bert", "modernbert", "onnxruntime")
    titles = [*(f"speed / {LABELS[peer]}" for peer in peers), "matrix products / our time", "peak MiB, ours / BERT"]
    shown = Table("case", *titles, box=box.MARKDOWN)
    for row in rows:
        if row["competitor"] != "dsx":
            continue
        line_up = [other for other in rows if (other["case"], other["lengths"]) == (row["case"], row["lengths"])]
        beside = {other["competitor"]: other for other in line_up}
        ratios = [f"{float(beside[peer]['ours_over_this']):.2f}" if peer in beside else "" for peer in peers]
        peaks = [beside[name]["peak_mib"] or "?" for name in ("dsx", "bert") if name in beside]
        name = f"{row['case']}, {row['note']}" if row["note"] else row["case"]
        share = f"{float(row['share_of_bound']):.0%}" if row["share_of_bound"] else ""
        shown.add_row(name, *ratios, share, " / ".join(peaks))
    return shown


def read_csv(path: Path) -> list[dict]:
    """The rows of a benchmark.csv."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file: run the benchmark first, or name its folder as --output_dir")
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def draw_bars(axes, place: float, height: float, entries: dict[str, dict]) -> None:
    """The bars of one case around `place`: tokens a second, those of stock BERT = 1; a tick where the bound is."""

    def relative(name, part=""):
        return float(entries[name][f"tokens_per_second{part}"]) / float(entries["bert"]["tokens_per_second"])

    names = [name for name in COLOURS if name in entries]
    for index, name in enumerate(names):
        value, low, high = relative(name), relative(name, "_q1"), relative(name, "_q3")
        middle = place + (index - (len(names) - 1) / 2) * height
        spread = [[max(value - low, 0)], [max(high - value, 0)]]
        axes.barh(middle, value, height, xerr=spread, color=COLOURS[name], label=LABELS[name], error_kw={"lw": 0.7})
        if name == "dsx":
            ratio = float(entries["bert"]["ours_over_this"])  # of neighbours in time, as in the tables
            axes.text(max(value, high), middle, f" {ratio:.2f}", va="center", fontsize=8)
    if "bound" in entries:
        axes.plot(relative("bound"), place, "|", color="black", ms=12, label=LABELS["bound"])


def draw_chart(path: str | Path, patterns: list[str] | None = None) -> Path:
    """Speed of every competitor in the cases that are compared (or those that a pattern matches): benchmark.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    rows = read_csv(path)
    cases = {}
    for row in rows:
        if any(fnmatch.fnmatch(row["case"], pattern) for pattern in patterns or ["*"]):
            cases.setdefault(row["case"], {})[row["competitor"]] = row
    cases = {name: entries for name, entries in cases.items() if "bert" in entries}
    if not cases:
        raise ValueError(
            f"cases={patterns} matches no comparison with BERT in {str(path)!r}: it holds "
            + ", ".join(sorted({row["case"] for row in rows}))
        )
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.6 * len(cases)))
    for place, entries in enumerate(cases.values()):
        draw_bars(axes, place, 0.2, entries)
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel("real tokens a second, stock BERT = 1: median over rounds, quartiles", fontsize=9)
    about = rows[0]
    title = f"{about['machine']}, {about['threads']} threads\nPyTorch {about['torch']}, {about['date']}"
    axes.set_title(title, fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), fontsize=8, ncols=5, loc="outside lower center", frameon=False)
    figure.set_layout_engine("constrained")
    target = path.with_name("benchmark.png")
    temporary = path.with_name(".benchmark.png")
    figure.savefig(temporary, dpi=130)
    pyplot.close(figure)
    os.replace(temporary, target)
    return target
