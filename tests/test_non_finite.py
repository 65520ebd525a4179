"""A loss or gradient that is not finite stops the run, is named, and reaches no checkpoint."""

import pytest
import torch
from learner import assert_same, learner, text_rows, weights
from transformers import TrainerCallback

from modeling_dsx_encoder import DsxEncoderForSequenceClassification
from modeling_dsx_encoder.non_finite import NonFiniteError


def spoil_output(module, args, output):
    return output * float("nan")


def spoil_gradient(gradient):
    return gradient * float("inf")


class SpoilAt(TrainerCallback):
    """From a step on, a module of the model is out of order."""

    def __init__(self, step, spoil):
        self.step, self.spoil = step, spoil

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.spoil(model)


FAULTS = {
    "output": (
        lambda model: model.model.layers[1].mlp.up_proj.register_forward_hook(spoil_output),
        r"the loss is not finite.*module 'model.layers.1.mlp.up_proj' \(Linear\) gives an output",
    ),
    "gradient": (
        lambda model: model.model.layers[0].mlp.down_proj.weight.register_hook(spoil_gradient),
        r"the gradient is not finite.*gradient of parameter 'model.layers.0.mlp.down_proj.weight'",
    ),
    "weight": (
        lambda model: model.classifier.weight.data.fill_(float("inf")),
        r"the loss is not finite.*parameter 'classifier.weight' is not finite before the step",
    ),
    "backward": (
        lambda model: model.model.layers[1].attention.register_forward_hook(
            lambda module, args, output: (
                (output[0] if isinstance(output, tuple) else output).register_hook(spoil_gradient) and None
            )
        ),
        r"the gradient is not finite.*comes back to the output of module 'model.layers.1.attention",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stops_the_run_and_is_named(name, tmp_path, tiny_tokenizer):
    spoil, match = FAULTS[name]
    trainer = learner("single_label", tmp_path, tiny_tokenizer, save_strategy="steps", save_steps=1, num_rows=16)
    trainer.add_callback(SpoilAt(3, spoil))
    with pytest.raises(NonFiniteError, match=rf"(?s)^step 3: {match}.*checkpoint-2.*What to try") as raised:
        trainer.train()
    assert "learning rate 0.000" in str(raised.value)
    assert not (tmp_path / "checkpoint-3").exists()
    kept = DsxEncoderForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(parameter).all() for parameter in kept.parameters())
    if name != "weight":
        assert_same(weights(kept), weights(trainer.model))


def test_a_number_in_the_data_that_is_not_finite_is_named(tmp_path, tiny_tokenizer):
    rows = text_rows(8, labels=lambda length, generator: float("nan"))
    trainer = learner("regression", tmp_path, tiny_tokenizer, dataset=rows)
    with pytest.raises(NonFiniteError, match=r"input 'labels' of micro-batch 0 .* no checkpoint had been written"):
        trainer.train()


def test_a_sound_run_is_left_alone(tmp_path, tiny_tokenizer):
    trainer = learner("single_label", tmp_path, tiny_tokenizer)
    trainer.train()
    callback = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "NonFiniteCallback")
    assert (callback.batches, callback.losses, callback.handle) == ([], [], None)
    assert not trainer.model._forward_hooks
