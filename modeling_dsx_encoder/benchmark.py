"""`make benchmark`: this encoder beside stock BERT, ModernBERT and ONNX Runtime, in one process, in turns.

- every round runs every batch of a case through every competitor, one after another, each time in another order: what
  else the machine does hits all alike; figures are medians over rounds with their quartiles
- the bound is measured in the same turns (`benchmark_bound.py`): the share is how much of our time it needs
- `benchmark.csv` is written whole after each case, so that an interrupted run keeps what it has

Speed counts real tokens a second: padding is nobody's text. On a machine that others use, give fewer threads than it
has cores: a thread that waits for its core holds up the others at the end of every operator, and whoever runs more and
smaller operators pays more for that. The column `load_average` (runnable processes, our threads among them) tells.
"""

import datetime
import gc
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console

from .benchmark_bound import Bound
from .benchmark_cases import Case, find_cases, make_batches
from .benchmark_memory import can_measure, peak_in_new_process, peak_on_cuda
from .benchmark_models import (
    TorchCompetitor,
    build_model,
    check_parameters,
    count_parameters,
    export_onnx,
    fastest_onnx,
)
from .benchmark_report import COMPETITORS, table, write_csv
from .benchmark_tools import make_texts, save_folders, tool_steps
from .benchmark_weights import make_folders, real_texts, why_absent
from .recipe import described

NO_ONNXRUNTIME = "onnxruntime is not installed, BERT in ONNX Runtime is left out: pip install 'dsx-encoder[bench]'"


@dataclass
class BenchmarkArguments:
    """What is measured and how often."""

    cases: list[str] = described([], "Names or patterns of cases, as in 'random-*'; all if not given.")
    rounds: int = described(7, "Measured rounds of each case, after one that is not counted.")
    quick: bool = described(False, "Two rounds and at most two batches of each case: a look, not a result.")
    device: Literal["cpu", "cuda"] = described("cpu", "Where the models run.")
    threads: int | None = described(None, "CPU threads of every competitor; PyTorch's choice if not given.")
    dropout: float = described(0.0, "Dropout rate of all competitors in training.")
    position_embedding_type: str = described("learned", "Positions of this encoder; learned as BERT's, rope, ...")
    memory: bool = described(True, "Also measure peak memory, each competitor in a process of its own.")
    seed: int = described(0, "Decides the texts.")
    chart_only: bool = described(False, "Only draw benchmark.png from the benchmark.csv that is there.")
    output_dir: str = described("runs/benchmark", "Folder for benchmark.csv, benchmark.png and exported models.")

    def __post_init__(self):
        if self.quick:
            self.rounds = min(self.rounds, 2)
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}, but a median needs at least 1: give --rounds 7")
        if self.threads is not None and self.threads < 1:
            raise ValueError(
                f"threads={self.threads}, but a competitor needs at least 1: give --threads 1 or leave it out"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda', but PyTorch sees no CUDA device here: give --device cpu")


def measure(
    steps: dict[str, list[Callable]], rounds: int, synchronize: Callable[[], None] = lambda: None
) -> dict[str, np.ndarray]:
    """Times of every competitor's batches, `(rounds, num_batches)` seconds, taken in turns.

    Args:
        steps: For each competitor one call per batch, equally many for all.
        rounds: Measured rounds; one more comes first, for caches and lazy initialisation.
        synchronize: Waits for the device.
    """
    names = list(steps)
    num_batches = len(steps[names[0]])
    times = {name: np.zeros((rounds, num_batches)) for name in names}
    for number in range(-1, rounds):
        gc.collect()
        gc.disable()  # a collection would be paid by whoever runs when it comes
        try:
            for index in range(num_batches):
                first = (number + index) % len(names)
                for name in names[first:] + names[:first]:
                    start = time.perf_counter()
                    result = steps[name][index]()
                    synchronize()
                    if number >= 0:
                        times[name][number, index] = time.perf_counter() - start
                    del result
        finally:
            gc.enable()
    return times


def machine_name(device: str) -> str:
    """Model of the processor or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def figures(times: dict[str, np.ndarray], batches: list[dict[str, torch.Tensor]]) -> dict[str, dict]:
    """Medians and quartiles over rounds from `(rounds, num_batches)` seconds of each competitor.

    Ratios are taken round by round, between neighbours in time, before their median.
    """
    lengths = torch.cat([batch["attention_mask"].sum(dim=1) for batch in batches])
    shortest, longest, num_tokens = lengths.min().item(), lengths.max().item(), lengths.sum().item()
    seconds = {name: values.sum(axis=1) for name, values in times.items()}  # (rounds,)
    rows = {}
    for name, values in seconds.items():
        q1, median, q3 = np.percentile(num_tokens / values, (25, 50, 75))
        rows[name] = {
            "lengths": f"{shortest}-{longest}" if shortest < longest else str(longest),
            "real_tokens": num_tokens,
            "tokens_per_second": round(median, 1),
            "tokens_per_second_q1": round(q1, 1),
            "tokens_per_second_q3": round(q3, 1),
            "seconds": float(f"{np.median(values):.5g}"),
            "ours_over_this": round(np.median(values / seconds["dsx"]), 3),
        }
    if "bound" in seconds:
        rows["dsx"]["share_of_bound"] = round(np.median(seconds["bound"] / seconds["dsx"]), 3)
    return rows


@dataclass
class Benchmark:
    """Runs cases and keeps their rows.

    Args:
        arguments: How to measure.
    """

    arguments: BenchmarkArguments
    console: Console = field(default_factory=Console)
    rows: list[dict] = field(default_factory=list)
    exports: dict[str, dict[str, Path]] = field(default_factory=dict)
    converted: dict[str, dict[str, Path]] = field(default_factory=dict)

    def run(self, cases: list[Case] | None = None) -> Path:
        """Measures the cases, those of the arguments if not given; returns the path of benchmark.csv."""
        path = Path(self.arguments.output_dir) / "benchmark.csv"
        cases = find_cases(self.arguments.cases) if cases is None else cases
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self.arguments.threads or threads_before)
        try:
            for case in cases:
                if self.arguments.quick and not case.texts.doubling:
                    few = min(case.texts.num_batches, 2)
                    case = replace(case, texts=replace(case.texts, num_batches=few))
                rows = self.run_case(case)
                self.rows += rows
                write_csv(path, self.rows)
                if rows:
                    self.console.print(table(case, rows))
        finally:
            torch.set_num_threads(threads_before)
        return path

    def run_case(self, case: Case) -> list[dict]:
        """One case: its texts and weights, then what is measured of them."""
        arguments = self.arguments
        options = {"dropout": arguments.dropout, "position_embedding_type": arguments.position_embedding_type}
        absent = why_absent(case.weights) if case.weights else ""
        if case.tool and arguments.device != "cpu":
            absent = "it is measured on the CPU alone"
        if absent:
            self.console.print(f"{case.name} is left out, {absent}", markup=False)
            return []
        batches = make_batches(case.texts, arguments.seed, arguments.device)
        if case.weights:
            folders = self.convert(case.weights)
            sentences, batches = real_texts(case.texts, folders["bert"], arguments.seed, arguments.device)
            options = {"folders": folders}
        elif case.tool:
            folders = save_folders(case, **options, target=Path(arguments.output_dir) / "tools" / case.name)
            sentences = make_texts(batches)
        if not case.tool:
            return self.run_models(case, batches, options)
        found = figures(measure(tool_steps(case, sentences, folders), arguments.rounds), batches)
        return self.describe(case, found, {}, {}, dict.fromkeys(found, ""))

    def run_models(self, case: Case, batches: list[dict], options: dict) -> list[dict]:
        """Models called as they are: build, check, measure, describe."""
        arguments = self.arguments
        models = {name: build_model(name, case, **options) for name in case.competitors if name != "onnxruntime"}
        check_parameters(models)
        notes = dict.fromkeys((*models, "bound"), "")
        competitors = {name: TorchCompetitor(model, case, arguments.device) for name, model in models.items()}
        steps = {name: [bind(competitor.step, batch) for batch in batches] for name, competitor in competitors.items()}
        bound = Bound(models["dsx"].config, case.mode == "training", case.precision, arguments.device)
        steps["bound"] = [bound.prepare(batch) for batch in batches]
        onnx_path = None
        if onnx_takes_part(case, arguments, self.console):
            paths = self.export(models["bert"])
            form, session = fastest_onnx(paths, models["bert"], batches, torch.get_num_threads())
            onnx_path, notes["onnxruntime"] = str(paths[form]), f"export: {form}"
            steps["onnxruntime"] = [bind(session.step, batch) for batch in batches]
        synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
        times = measure(steps, arguments.rounds, synchronize)
        counts = {name: count_parameters(model) for name, model in models.items()}
        counts["onnxruntime"] = counts.get("bert")
        rows = []
        # Where texts grow from batch to batch, each length has rows of its own.
        for part in [[index] for index in range(len(batches))] if case.texts.doubling else [range(len(batches))]:
            of_part = [batches[index] for index in part]
            found = figures({name: values[:, list(part)] for name, values in times.items()}, of_part)
            peaks = self.peaks(case, competitors, of_part, options, onnx_path)
            if rows:
                longer = found["dsx"]["seconds"] / rows[0]["seconds"]
                notes["dsx"] = f"{longer:.2f} times the time of {rows[0]['lengths']} tokens"
            rows += self.describe(case, found, peaks, counts, notes)
        return rows

    def convert(self, weights: str) -> dict[str, Path]:
        """Folders of the stock model and of what it becomes; cases of the same weights share them."""
        if weights not in self.converted:
            target = Path(self.arguments.output_dir) / "weights" / Path(weights).name
            self.converted[weights], largest = make_folders(weights, target)
            self.console.print(f"{weights} converted: outputs differ by {largest:.1e} at most", markup=False)
        return self.converted[weights]

    def export(self, model) -> dict[str, Path]:
        """Files of the exported BERT; cases of one shape share them, their models have the same weights."""
        config = model.config
        key = f"{config.hidden_size}x{config.num_hidden_layers}-{config.max_position_embeddings}"
        if key not in self.exports:
            self.exports[key] = export_onnx(model, Path(self.arguments.output_dir) / "onnx" / key)
        return self.exports[key]

    def peaks(self, case, competitors, batches, options, onnx_path) -> dict[str, float]:
        """Peak memory of each competitor in MiB; empty where it cannot be measured."""
        arguments = self.arguments
        if not arguments.memory:
            return {}
        if arguments.device == "cuda":
            return {name: peak_on_cuda(entry, batches, "cuda") for name, entry in competitors.items()}
        if not can_measure():
            return {}
        names = [*competitors, *(["onnxruntime"] if onnx_path else [])]
        threads = torch.get_num_threads()
        return {name: peak_in_new_process(case, name, options, batches, threads, onnx_path) for name in names}

    def describe(self, case, found, peaks, counts, notes) -> list[dict]:
        """Rows of the CSV, in the order of the competitors."""
        load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else ""
        about = {
            "case": case.name, "mode": case.mode, "precision": case.precision, "texts": case.texts_name,
            "batch_size": case.texts.batch_size, "shape": str(case.shape), "layers": case.layers,
            "rounds": self.arguments.rounds, "device": self.arguments.device, "threads": torch.get_num_threads(),
            "machine": machine_name(self.arguments.device), "torch": torch.__version__,
            "date": datetime.date.today().isoformat(), "load_average": load,
        }  # fmt: skip
        rows = []
        for name in sorted(found, key=COMPETITORS.index):
            layers, parameters = counts.get(name) or ("", "")
            peak = round(peaks[name], 1) if name in peaks else ""
            own = {"competitor": name, "layer_parameters": layers, "parameters": parameters, "peak_mib": peak}
            rows.append(about | found[name] | own | {"note": notes[name]})
        return rows


def bind(step: Callable, batch: dict) -> Callable:
    """The step of one batch."""
    return lambda: step(batch)


def onnx_takes_part(case: Case, arguments: BenchmarkArguments, console: Console) -> bool:
    """ONNX Runtime is compared where it can do the same: inference in fp32 on the CPU."""
    if "onnxruntime" not in case.competitors or case.mode != "inference":
        return False
    if case.precision != "fp32" or arguments.device != "cpu":
        return False
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        console.print(NO_ONNXRUNTIME, markup=False)
        return False
    return True
