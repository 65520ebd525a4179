"""Training: losses that do not depend on how the work is cut up, and runs that can be repeated and resumed."""

import math

import pytest
import torch
from datasets import Dataset
from learner import DROPOUT, LOSSES, arguments, assert_same, learner, text_rows, weights
from tiny import HEADS, build, tiny_config
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from modeling_dsx_encoder import (
    DsxEncoderForMaskedLM,
    DsxEncoderForMultipleChoice,
    DsxEncoderForSequenceClassification,
)
from modeling_dsx_encoder.epoch_order import EpochCallback
from modeling_dsx_encoder.flattening import FlatteningCollator
from modeling_dsx_encoder.masking import MaskedLanguageModelingCollator, fixed_masks
from modeling_dsx_encoder.tasks import TASKS
from modeling_dsx_encoder.training import (
    DsxTrainer,
    build_trainer,
    last_checkpoint,
    parameter_groups,
    use_task_metric,
)

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


def test_trainer_uses_these_groups(tmp_path):
    model = DsxEncoderForSequenceClassification(tiny_config(position_embedding_type="learned"))
    trainer = build_trainer(model, arguments(tmp_path, weight_decay=0.1))
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
    """Nor does it whether the collator pads or flattens."""
    found = []
    for batch, steps, flatten in ((8, 1, False), (2, 4, False), (8, 1, True), (2, 4, True)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = learner(name, tmp_path, tiny_tokenizer, learning_rate=0.0, flatten=flatten, **options)
        trainer.train()
        found.append(trainer.state.log_history[0])
    for other in found[1:]:
        assert found[0]["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert found[0]["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-4)
    reference = learner(name, tmp_path, tiny_tokenizer)
    batch = reference.data_collator(list(reference.train_dataset))
    assert found[0]["loss"] == pytest.approx(reference.model(**batch).loss.item(), abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_loss_is_the_mean_over_items_for_every_batch_size(name, tmp_path, tiny_tokenizer):
    padded = learner(name, tmp_path, tiny_tokenizer, num_rows=13)
    batch = padded.data_collator(list(padded.eval_dataset))
    expected = padded.model.eval()(**batch).loss.item()
    for trainer in (padded, learner(name, tmp_path, tiny_tokenizer, num_rows=13, flatten=True)):
        for size in (1, 4, 13):
            trainer.args.per_device_eval_batch_size = size
            assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
            assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["token", "masked_lm"])
def test_a_label_on_padding_counts_nothing(name, tmp_path, tiny_tokenizer):
    """A collator may pad labels with a class number: padding is not computed, so it is no item."""
    trainer = learner(name, tmp_path, tiny_tokenizer, num_rows=5)
    batch = trainer.data_collator(list(trainer.eval_dataset))
    expected = trainer.model.eval()(**batch).loss.item()
    assert (batch["attention_mask"] == 0).any()
    trainer.data_collator = lambda rows: (
        batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 1)}
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.args.learning_rate = 0.0
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-5)


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
    assert_same(before, weights(trainer.model))


@pytest.mark.parametrize("stock", [False, True])
def test_each_epoch_asks_for_other_tokens(stock, tmp_path, tiny_tokenizer):
    """The collator hears of the epoch from DsxTrainer, and from stock Trainer with the callback."""
    collator, seen = MaskedLanguageModelingCollator(tiny_tokenizer, seed=3), []
    rows = text_rows(4)
    kwargs = {"train_dataset": rows, "data_collator": lambda batch: seen.append(collator(batch)) or seen[-1]}
    kwargs["data_collator"].set_epoch = collator.set_epoch
    options = arguments(tmp_path, num_train_epochs=3, per_device_train_batch_size=4, max_steps=-1)
    trainer = (Trainer if stock else DsxTrainer)(DsxEncoderForMaskedLM(tiny_config()), options, **kwargs)
    if stock:
        trainer.add_callback(EpochCallback(trainer))
    trainer.train()

    def asked(batch):
        """What each row is asked for, as places and tokens."""
        rows = batch["labels"].tolist()
        return {tuple((place, token) for place, token in enumerate(row) if token != -100) for row in rows}

    expected = []
    for epoch in range(3):
        collator.set_epoch(epoch)
        expected.append({next(iter(asked(collator([row])))) for row in rows})
    assert [asked(batch) for batch in seen] == expected
    assert expected[0] != expected[1] != expected[2] != expected[0]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_predictions_are_one_row_an_example_in_the_given_order(name, flatten, tmp_path, tiny_tokenizer):
    """Case 7, for the collator that pads and the one that flattens, whatever the batch size."""
    options = {"train_sampling_strategy": "group_by_length", "flatten": flatten}
    trainer = learner(name, tmp_path, tiny_tokenizer, num_rows=11, **options)
    for size in (4, 1, 11):
        trainer.args.per_device_eval_batch_size = size
        found = trainer.predict(trainer.eval_dataset)
        shown = []
        trainer.compute_metrics = lambda prediction, shown=shown: shown.append(prediction) or {}
        trainer.evaluate()
        predictions, labels = (value if isinstance(value, tuple) else (value,) for value in found[:2])
        for seen, given in ((shown[0].predictions, predictions), (shown[0].label_ids, labels)):
            for first, second in zip(seen if isinstance(seen, tuple) else (seen,), given, strict=True):
                assert (first == second).all()
        for number, row in enumerate(trainer.eval_dataset):
            output = trainer.model.eval()(torch.tensor([row["input_ids"]]))
            keys = ("start_positions", "end_positions") if name == "question" else ("labels",)
            for logits, alone in zip(predictions, list(output.values()), strict=True):
                alone = alone[0].detach()
                torch.testing.assert_close(torch.tensor(logits[number][: len(alone)]), alone, atol=1e-5, rtol=1e-5)
            for given, key in zip(labels, keys, strict=True):
                expected = torch.tensor(row[key])
                kept = given[number][: len(expected)] if expected.dim() else given[number]
                torch.testing.assert_close(torch.tensor(kept), expected)
                assert expected.dim() == 0 or (given[number][len(expected) :] == -100).all()
        assert all(len(value) == 11 for value in predictions + labels)


def test_predictions_of_choices_are_one_row_an_example(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 99, (11, 3, 6), generator=generator)
    rows = [{"input_ids": choices, "labels": number % 3} for number, choices in enumerate(tokens)]
    model = build(DsxEncoderForMultipleChoice, tiny_config())
    trainer = build_trainer(
        model, arguments(tmp_path, per_device_eval_batch_size=4), train_dataset=rows, eval_dataset=rows
    )
    found = trainer.predict(rows)
    whole = model(tokens, labels=torch.arange(11) % 3)
    torch.testing.assert_close(torch.tensor(found.predictions), whole.logits.detach(), atol=1e-5, rtol=1e-5)
    assert found.label_ids.tolist() == [number % 3 for number in range(11)]
    assert found.metrics["test_loss"] == pytest.approx(whole.loss.item(), abs=1e-5)


def test_inputs_of_flattened_batches_cannot_go_to_the_metrics(tmp_path, tiny_tokenizer):
    options = {"flatten": True, "include_for_metrics": ["inputs"]}
    with pytest.raises(ValueError, match=r"include_for_metrics.*'inputs'.*flattened"):
        learner("single_label", tmp_path, tiny_tokenizer, **options).evaluate()


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


# ---- the best checkpoint ----


def test_best_checkpoint_is_chosen_by_the_metric_of_the_task(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    args = arguments(tmp_path, **options)
    use_task_metric(args, TASKS["single_label"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)
    args = arguments(tmp_path, metric_for_best_model="eval_loss", **options)
    use_task_metric(args, TASKS["single_label"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_loss", False)


def test_streamed_rows_are_all_predicted_from_flattened_batches(tmp_path):
    """Accelerate's dispatcher, the default for streams, would cut a flattened batch after its first row."""
    rows = [{"input_ids": [5 + row] * (3 + row % 4), "labels": [row % 3] * (3 + row % 4)} for row in range(11)]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, report_to="none", use_cpu=True)
    model = build(HEADS["token"], tiny_config())
    found = build_trainer(model, args, collator=FlatteningCollator()).predict(stream)
    assert found.predictions.shape == (11, 6, 3)
    assert found.label_ids[:, 0].tolist() == [row % 3 for row in range(11)]
    args = TrainingArguments(
        str(tmp_path), accelerator_config={"dispatch_batches": True}, report_to="none", use_cpu=True
    )
    with pytest.raises(ValueError, match="dispatch_batches=True would cut flattened batches"):
        build_trainer(model, args, collator=FlatteningCollator())


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_answers_half_cut_off_are_no_items_at_any_batch_size(batch_size, tmp_path):
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 9, (11, 2), generator=generator).tolist()
    rows = [
        {"input_ids": [5 + row] * 6, "attention_mask": [1] * 6, "start_positions": start, "end_positions": end}
        for row, (start, end) in enumerate(places)
    ]
    assert any((start < 6) != (end < 6) for start, end in places)
    model = build(HEADS["question"], tiny_config())
    whole = [row for row in rows if row["start_positions"] < 6 and row["end_positions"] < 6]
    batch = {name: torch.tensor([row[name] for row in whole]) for name in whole[0]}
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=batch_size, report_to="none", use_cpu=True)
    found = build_trainer(model, args).evaluate(Dataset.from_list(rows))["eval_loss"]
    assert found == pytest.approx(model(**batch).loss.item(), abs=1e-5)
