"""Training: losses that do not depend on how the work is cut up, runs that can be repeated and resumed, faults named."""

import json
import math

import pytest
import torch
from datasets import Dataset
from tiny import HEADS, tiny_config
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, TrainerCallback, set_seed

from modeling_dsx_encoder import DsxEncoderForMaskedLM, DsxEncoderForSequenceClassification
from modeling_dsx_encoder.masking import MaskedLanguageModelingCollator, fixed_masks
from modeling_dsx_encoder.recipe import DsxTrainingArguments
from modeling_dsx_encoder.tasks import TASKS
from modeling_dsx_encoder.training import (
    EpochSampler,
    NonFiniteError,
    build_trainer,
    last_checkpoint,
    parameter_groups,
    prepare_run,
    save_finished,
    use_task_metric,
)

DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}


def arguments(folder, **options):
    plain = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    plain |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 2}
    return DsxTrainingArguments(str(folder), **(plain | options))


def text_rows(num_rows, longest=40, seed=0, **columns):
    """Rows of random tokens, 3 to `longest` of them; each column is made by a function of its length and a generator."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(3, longest + 1, (), generator=generator))
        tokens = torch.randint(5, 99, (length,), generator=generator).tolist()
        row = {"input_ids": tokens, "attention_mask": [1] * length}
        rows.append(row | {name: make(length, generator) for name, make in columns.items()})
    return Dataset.from_list(rows)


def whole(high):
    return lambda length, generator: int(torch.randint(0, high, (), generator=generator))


def number(length, generator):
    return float(torch.randn((), generator=generator))


def flags(length, generator):
    return torch.randint(0, 2, (3,), generator=generator).float().tolist()


def tags(length, generator):
    chosen = torch.randint(0, 3, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.4, chosen, -100).tolist()


# name: head, problem type, number of labels, what makes the labels of a row
LOSSES = {
    "single_label": ("sequence", "single_label_classification", 3, whole(3)),
    "multi_label": ("sequence", "multi_label_classification", 3, flags),
    "regression": ("sequence", "regression", 1, number),
    "regression_unsaid": ("sequence", None, 1, number),
    "token": ("token", None, 3, tags),
    "masked_lm": ("masked_lm", None, 2, tags),
    "question": ("question", None, 2, None),
}


def learner(name, folder, tokenizer, num_rows=8, longest=20, dataset=None, **options):
    """A trainer without dropout for one kind of loss."""
    head, problem_type, num_labels, make = LOSSES[name]
    columns = {"labels": make} if make else {"start_positions": whole(3), "end_positions": whole(3)}
    rows = text_rows(num_rows, longest, **columns) if dataset is None else dataset
    set_seed(0)
    model = HEADS[head](tiny_config(problem_type=problem_type, num_labels=num_labels))
    by_token = name in ("token", "masked_lm")
    collator = (DataCollatorForTokenClassification if by_token else DataCollatorWithPadding)(tokenizer)
    return build_trainer(model, arguments(folder, **options), train_dataset=rows, eval_dataset=rows, collator=collator)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# ---- optimiser ----


def test_no_decay_on_biases_norms_and_tables_of_positions():
    for scheme in ("learned", "relative_bias"):
        config = tiny_config(position_embedding_type=scheme, mlp_bias=True, attention_bias=True, embedding_norm=True)
        model = DsxEncoderForMaskedLM(config)
        decayed, spared = parameter_groups(model, 0.1)
        assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed_names = {named[id(parameter)] for parameter in decayed["params"]}
        spared_names = {named[id(parameter)] for parameter in spared["params"]}
        assert decayed_names | spared_names == set(named.values())
        assert "model.embeddings.word_embeddings.weight" in decayed_names
        assert "model.layers.0.attention.qkv_proj.weight" in decayed_names
        for name in spared_names:
            assert name.endswith("bias") or "norm" in name or "positions" in name, name
        assert any("positions" in name for name in spared_names)
        assert not any("norm" in name or "positions" in name or name.endswith("bias") for name in decayed_names)


def test_trainer_uses_these_groups(tmp_path, tiny_tokenizer):
    trainer = learner("single_label", tmp_path, tiny_tokenizer, weight_decay=0.1)
    sizes = [[p.shape for p in group["params"]] for group in trainer.create_optimizer().param_groups]
    assert sizes == [[p.shape for p in group["params"]] for group in parameter_groups(trainer.model, 0.1)]


@pytest.mark.parametrize("warmup", [4, 0.2])
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", lambda step: (20 - step) / 16),
        ("cosine", lambda step: 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))),
        ("inverse_sqrt", lambda step: (step / 4) ** -0.5),
    ],
)
def test_schedules_with_warm_up_in_steps_or_as_a_ratio(tmp_path, tiny_tokenizer, schedule, expected, warmup):
    options = {"lr_scheduler_type": schedule, "warmup_steps": warmup, "learning_rate": 1.0}
    trainer = learner("single_label", tmp_path, tiny_tokenizer, **options)
    trainer.create_optimizer_and_scheduler(20)
    rates = []
    for _ in range(20):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[:4] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert rates[4:] == pytest.approx([expected(step) for step in range(4, 20)], abs=1e-6)


def test_gradients_are_clipped_to_1_by_default(tmp_path):
    assert arguments(tmp_path).max_grad_norm == 1.0


# ---- losses ----


@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_changes_neither_loss_nor_gradient(name, tmp_path, tiny_tokenizer):
    found = []
    for batch, steps in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = learner(name, tmp_path, tiny_tokenizer, learning_rate=0.0, **options)
        trainer.train()
        found.append(trainer.state.log_history[0])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-4)
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], abs=1e-4)
    reference = learner(name, tmp_path, tiny_tokenizer)
    batch = reference.data_collator(list(reference.train_dataset))
    assert found[0]["loss"] == pytest.approx(reference.model(**batch).loss.item(), abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_loss_is_the_mean_over_items_for_every_batch_size(name, tmp_path, tiny_tokenizer):
    trainer = learner(name, tmp_path, tiny_tokenizer, num_rows=13)
    trainer.model.eval()
    batch = trainer.data_collator(list(trainer.eval_dataset))
    expected = trainer.model(**batch).loss.item()
    for size in (1, 4, 13):
        trainer.args.per_device_eval_batch_size = size
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
        assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected, abs=1e-4)


def test_masked_evaluation_asks_for_the_same_tokens_in_every_batch_size(tmp_path, tiny_tokenizer):
    lines = text_rows(33, longest=63, seed=4)
    lines = fixed_masks(lines, tiny_tokenizer, mask_probability=0.3, seed=1)
    torch.manual_seed(0)
    model = DsxEncoderForMaskedLM(tiny_config())
    total, count = 0.0, 0
    for row in lines:
        labels = torch.tensor([row["labels"]])
        if items := int((labels != -100).sum()):
            loss = model.eval()(torch.tensor([row["input_ids"]]), labels=labels).loss
            total, count = total + loss.item() * items, count + items
    for size in (1, 4, 16, 33):
        collator = MaskedLanguageModelingCollator(tiny_tokenizer, 0.3, seed=2)
        options = arguments(tmp_path, per_device_eval_batch_size=size, train_sampling_strategy="group_by_length")
        trainer = build_trainer(model, options, eval_dataset=lines, collator=collator, tokenizer=tiny_tokenizer)
        for _ in range(2):
            assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, abs=1e-4)


def test_regression_target_of_minus_100_is_a_target(tmp_path, tiny_tokenizer):
    rows = text_rows(4, labels=lambda length, generator: -100.0)
    trainer = learner("regression", tmp_path, tiny_tokenizer, dataset=rows, per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(10_000, rel=0.01)
    assert trainer.train().training_loss == pytest.approx(10_000, rel=0.02)


def test_a_batch_without_a_masked_token_costs_nothing(tmp_path, tiny_tokenizer):
    rows = text_rows(4, labels=lambda length, generator: [-100] * length)
    trainer = learner("masked_lm", tmp_path, tiny_tokenizer, dataset=rows)
    before = weights(trainer.model)
    assert trainer.train().training_loss == 0.0
    assert trainer.evaluate()["eval_loss"] == 0.0
    assert all(torch.isfinite(value).all() for value in weights(trainer.model).values())
    assert_same({k: v for k, v in before.items() if "bias" in k}, {k: v for k, v in before.items() if "bias" in k})


def test_predictions_keep_the_order_of_rows(tmp_path, tiny_tokenizer):
    options = {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 4}
    trainer = learner("single_label", tmp_path, tiny_tokenizer, num_rows=11, **options)
    found = torch.tensor(trainer.predict(trainer.eval_dataset).predictions)
    for row, logits in zip(trainer.eval_dataset, found, strict=True):
        alone = trainer.model.eval()(torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(alone, logits, atol=1e-5, rtol=0)


# ---- order of rows ----


def test_order_depends_on_seed_and_epoch_alone():
    sampler = EpochSampler(50, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        torch.rand(5)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(50)) == list(range(len(sampler)))
    assert list(EpochSampler(50, seed=4)) != orders[0]


def test_rows_of_like_length_come_together():
    lengths = torch.randint(3, 500, (400,)).tolist()
    order = list(EpochSampler(400, 0, lengths, group_size=8))
    assert sorted(order) == list(range(400))
    padded = sum(8 * max(lengths[row] for row in order[i : i + 8]) for i in range(0, 400, 8))
    assert padded < 1.1 * sum(lengths)


# ---- repeat and resume ----


class Kill(TrainerCallback):
    """Stands in for a killed process: nothing after this step happens."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, tokenizer, callbacks=(), resume=None, noise=0, **options):
    """One masked-LM run with dropout, evaluation and checkpoints; 7 steps an epoch, 21 in all."""
    rows = text_rows(26, seed=9)
    plain = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 2}
    plain |= {"train_sampling_strategy": "group_by_length", "warmup_steps": 0.1, "lr_scheduler_type": "cosine"}
    set_seed(5)
    model = DsxEncoderForMaskedLM(tiny_config(**DROPOUT))
    torch.rand(noise)  # a resumed process has drawn other numbers before
    trainer = build_trainer(
        model,
        arguments(folder, **(plain | options)),
        train_dataset=rows,
        eval_dataset=fixed_masks(rows, tokenizer),
        collator=MaskedLanguageModelingCollator(tokenizer, 0.3, seed=5),
        tokenizer=tokenizer,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer.model)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_one_seed_gives_one_result_and_a_killed_run_ends_there_too(strategy, tmp_path, tiny_tokenizer):
    options = {"train_sampling_strategy": strategy}
    unbroken = run(tmp_path / "a", tiny_tokenizer, **options)
    assert_same(unbroken, run(tmp_path / "b", tiny_tokenizer, eval_strategy="steps", eval_steps=3, **options))
    for step, checkpoint in ((6, 4), (15, 12)):
        folder = tmp_path / f"killed-{step}"
        with pytest.raises(KeyboardInterrupt):
            run(folder, tiny_tokenizer, [Kill(step)], **options)
        assert last_checkpoint(folder) == str(folder / f"checkpoint-{checkpoint}")
        resumed = run(folder, tiny_tokenizer, resume=last_checkpoint(folder), noise=9, **options)
        assert_same(unbroken, resumed)


def test_accumulated_run_resumes_at_the_end_of_an_epoch(tmp_path, tiny_tokenizer):
    options = {"gradient_accumulation_steps": 2, "save_strategy": "epoch"}
    unbroken = run(tmp_path / "a", tiny_tokenizer, **options)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", tiny_tokenizer, [Kill(5)], **options)
    resumed = run(tmp_path / "b", tiny_tokenizer, resume=last_checkpoint(tmp_path / "b"), noise=9, **options)
    assert_same(unbroken, resumed)


# ---- faults ----


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


# ---- folders ----


def make_checkpoint(folder, step, state=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if state:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return str(path)


def test_half_written_checkpoints_are_not_resumed_from(tmp_path):
    assert last_checkpoint(tmp_path / "nothing") is None
    whole_one = make_checkpoint(tmp_path, 9)
    make_checkpoint(tmp_path, 10, state=False)
    broken = make_checkpoint(tmp_path, 11)
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == whole_one != broken


def test_an_earlier_run_is_gone_on_with_dropped_or_refused(tmp_path):
    last = make_checkpoint(tmp_path / "checkpoints", 3)
    with pytest.raises(
        ValueError, match=r"output_dir=.* holds checkpoints of an earlier run: .*--overwrite_output_dir"
    ):
        prepare_run(arguments(tmp_path))
    args = arguments(tmp_path, resume_from_checkpoint="true")
    assert prepare_run(args) == tmp_path
    assert (args.resume_from_checkpoint, args.output_dir) == (last, str(tmp_path / "checkpoints"))
    args = arguments(tmp_path, overwrite_output_dir=True)
    prepare_run(args)
    assert args.resume_from_checkpoint is None
    assert not (tmp_path / "checkpoints").exists()
    args = arguments(tmp_path, resume_from_checkpoint="True")
    prepare_run(args)
    assert args.resume_from_checkpoint is None  # nothing to resume from yet: the first run of a job that may restart


def test_finished_model_takes_its_place_at_once(tmp_path, tiny_tokenizer):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    args = arguments(tmp_path, num_train_epochs=1)
    output = prepare_run(args)
    trainer = learner("single_label", args.output_dir, tiny_tokenizer)
    save_finished(trainer, output, {"test_accuracy": 0.5}, (args,))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "metrics.json", "recipe.yaml"} <= names
    assert not names & {"model-00001-of-00002.safetensors", ".unfinished", "training_args.bin"}
    assert json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"] == 0.5
    assert f"output_dir: {tmp_path}" in (tmp_path / "recipe.yaml").read_text()
    loaded = DsxEncoderForSequenceClassification.from_pretrained(tmp_path)
    assert_same(weights(loaded), weights(trainer.model))


def test_a_run_that_fails_while_saving_leaves_the_old_model(tmp_path, tiny_tokenizer, monkeypatch):
    args = arguments(tmp_path, num_train_epochs=1)
    output = prepare_run(args)
    trainer = learner("single_label", args.output_dir, tiny_tokenizer)
    save_finished(trainer, output, {}, (args,))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("modeling_dsx_encoder.runs.write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_finished(trainer, output, {}, (args,))
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_best_checkpoint_is_chosen_by_the_metric_of_the_task(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    args = arguments(tmp_path, **options)
    use_task_metric(args, TASKS["single_label"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)
    args = arguments(tmp_path, metric_for_best_model="eval_loss", **options)
    use_task_metric(args, TASKS["single_label"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_loss", False)
