"""Peak memory of one competitor in one case, above its weights (and gradients, in training), in MiB.

On CUDA the allocator of PyTorch counts. On CPU every measurement is a fresh process: it builds the competitor, takes
one small step, so that libraries, gradients and threads are there, gives unused memory back, sets the kernel's
high-water mark of resident memory to what is left, and runs the batches of the case once. What the C library keeps of
freed blocks counts as used: a machine must have it. Only Linux has such a mark; elsewhere nothing is reported.
"""

import ctypes
import gc
import multiprocessing
import re
from pathlib import Path

import torch

from .benchmark_cases import Case
from .benchmark_models import OnnxCompetitor, TorchCompetitor, build_model

MARK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
SMALL = {"input_ids": torch.full((1, 8), 1000), "attention_mask": torch.ones(1, 8, dtype=torch.long)}


def can_measure() -> bool:
    """Whether this system has a high-water mark that can be reset, and processes that start with the imports done."""
    return MARK.exists() and "forkserver" in multiprocessing.get_all_start_methods()


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the mark) of this process, in KiB."""
    return int(re.search(rf"{field}:\s*(\d+) kB", STATUS.read_text())[1])


def peak_here(
    case: Case,
    name: str,
    options: dict,
    batches: list[dict[str, torch.Tensor]],
    num_threads: int,
    onnx_path: str | None = None,
) -> float:
    """The measurement itself, for a process that does nothing else; `options` are those of `build_model`."""
    torch.set_num_threads(num_threads)
    if name == "onnxruntime":
        competitor = OnnxCompetitor(onnx_path, num_threads)
    else:
        competitor = TorchCompetitor(build_model(name, case, **options), case)
    competitor.step(SMALL)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    MARK.write_text("5")
    for batch in batches:
        competitor.step(batch)
    return (resident("VmHWM") - before) / 1024


def peak_in_new_process(*arguments) -> float:
    """`peak_here` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1) as pool:
        return pool.apply(peak_here, arguments)


def peak_on_cuda(competitor: TorchCompetitor, batches: list[dict[str, torch.Tensor]], device: str) -> float:
    """The same on a GPU, in this process: its allocator knows the live tensors."""
    competitor.step(batches[0])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for batch in batches:
        competitor.step(batch)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
