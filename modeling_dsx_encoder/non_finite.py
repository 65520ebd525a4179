"""Stops training at the first loss or gradient that is not a finite number, and says where it came from.

- `NonFiniteCallback` looks before each optimiser step, so that neither the weights nor a checkpoint take the fault in
- `first_fault` runs the batches of that step again and names the first module, or parameter, that is not finite
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from .runs import last_checkpoint

ADVICE = (
    "What to try: a lower learning_rate or more warmup_steps; max_grad_norm 1.0; bf16 or fp32 in place of fp16; "
    "and look at the rows of this batch (empty texts, labels out of range, numbers that are not finite)."
)


class NonFiniteError(ValueError):
    """Training met a loss or gradient that is not finite; weights and checkpoints are as they were before the step."""


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """All floating tensors of a module's output, however nested."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all numbers of all tensors are finite; the device is waited for once."""
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    # The largest |x| cannot overflow, as a sum of squares can, and carries NaN through.
    return not filled or bool(torch.nn.utils.get_total_norm(filled, norm_type=math.inf).isfinite())


class _Watch:
    """Hooks on every module that note the first one whose output, or whose output's gradient, is not finite."""

    def __init__(self, model: nn.Module):
        self.forward_fault: str | None = None
        self.backward_fault: str | None = None
        self.handles = [
            module.register_forward_hook(self._hook(name, model)) for name, module in model.named_modules()
        ]

    def _hook(self, name: str, model: nn.Module):
        # Children are done before their parents, so the first one noted is the innermost.
        described = f"module {name!r}" if name else f"the loss of {type(model).__name__}"

        def look(module, args, output):
            found = list(tensors_in(output))
            if self.forward_fault is None and not is_finite(found):
                self.forward_fault = f"{described} ({type(module).__name__}) gives an output that is not finite"
            for tensor in found:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._look_back(name, module, gradient))

        return look

    def _look_back(self, name: str, module: nn.Module, gradient: torch.Tensor) -> None:
        if self.backward_fault is None and not is_finite([gradient]):
            where = f"module {name!r} ({type(module).__name__})" if name else "the loss"
            self.backward_fault = f"the gradient that comes back to the output of {where} is not finite"

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self.handles:
            handle.remove()


def first_fault(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> str:
    """Runs `batches` again, forward and backward, and says what is not finite first. Gradients are lost."""
    for name, parameter in model.named_parameters():
        if not is_finite([parameter]):
            return f"parameter {name!r} is not finite before the step"
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            if not is_finite(tensors_in(value)):
                return f"input {name!r} of micro-batch {number} is not finite"
        model.zero_grad()
        watch = _Watch(model)
        try:
            output = model(**batch)
            if watch.forward_fault is None:
                loss = output.get("loss") if isinstance(output, Mapping) else output[0]
                if loss is not None:  # a loss of the trainer's own (label smoothing) is not repeated here
                    loss.backward()
        finally:
            watch.remove()
        faulty = [n for n, p in model.named_parameters() if p.grad is not None and not is_finite([p.grad])]
        # Backward runs from the last parameter to the first, so the last one is where it began.
        from_parameter = f"the gradient of parameter {faulty[-1]!r} is not finite" if faulty else None
        fault = watch.forward_fault or watch.backward_fault or from_parameter
        if fault:
            return f"{fault} (micro-batch {number})"
    return "no module when this process ran the batch again (dropout differs; or another process holds the fault)"


class NonFiniteCallback(TrainerCallback):
    """Raises `NonFiniteError` before an optimiser step whose losses or gradients are not finite.

    Under fp16 a gradient that overflows is usual: the loss scale falls and the step is skipped. There only the loss,
    and a gradient at a loss scale below 1, stop the run.
    """

    def __init__(self):
        self.batches: list[Mapping[str, Any]] = []
        self.losses: list[torch.Tensor] = []
        self.handle = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Follows what the model is given and what loss it returns."""
        self.on_train_end(args, state, control)
        self.handle = model.register_forward_hook(self._note, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        """Lets the model go."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None
        self.batches, self.losses = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        """A step's micro-batches are kept until the next one."""
        self.batches, self.losses = [], []

    def _note(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not model.training:
            return
        self.batches.append(kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
        if loss is not None:
            self.losses.append(loss.detach())

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Looks at the losses of all micro-batches and at the gradients, after clipping and before the step."""
        scaler = getattr(optimizer, "scaler", None)
        judges_gradients = scaler is None or scaler.get_scale() < 1.0
        gradients = [p.grad for p in model.parameters() if p.grad is not None] if judges_gradients else []
        if is_finite([*self.losses, *gradients]):
            return
        what = "gradient" if is_finite(self.losses) else "loss"
        rate = optimizer.param_groups[0]["lr"]
        batches = self.batches
        self.on_train_end(args, state, control)  # its own hook must not follow the second run
        fault = first_fault(model, batches)
        raise NonFiniteError(
            f"step {state.global_step + 1}: the {what} is not finite, at learning rate {rate:.3g}. "
            f"First at fault: {fault}. The step was not taken; {self._last_good(args.output_dir)}. {ADVICE}"
        )

    @staticmethod
    def _last_good(folder: str) -> str:
        path = last_checkpoint(folder)
        return f"the last good checkpoint is {path}" if path else "no checkpoint had been written yet"
