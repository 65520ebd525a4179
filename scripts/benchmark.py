"""Measure this encoder beside stock BERT, ModernBERT and ONNX Runtime, in turns, in one process.

    python scripts/benchmark.py --quick true
    python scripts/benchmark.py --cases 'random-*' 'sorted-*' --threads 2
    python scripts/benchmark.py --device cuda --output_dir runs/benchmark-gpu
    python scripts/benchmark.py --chart_only true --cases 'random-*'

Writes benchmark.csv (a row for each case and competitor, rewritten after each case) and benchmark.png.
"""

from pathlib import Path

from rich.console import Console

from modeling_dsx_encoder.benchmark import Benchmark, BenchmarkArguments
from modeling_dsx_encoder.benchmark_report import draw_chart, read_csv, summary
from modeling_dsx_encoder.recipe import parse_recipe


def main() -> None:
    """Parse, measure, draw."""
    (arguments,) = parse_recipe((BenchmarkArguments,))
    path = Path(arguments.output_dir) / "benchmark.csv"
    if not arguments.chart_only:
        Benchmark(arguments).run()
    Console(width=160).print(summary(read_csv(path)))
    print(f"benchmark: {path} and {draw_chart(path, arguments.cases)}")


if __name__ == "__main__":
    main()
