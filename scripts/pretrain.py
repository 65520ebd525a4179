"""Masked language modelling: an encoder with new weights (or a checkpoint) learns from raw text.

    python scripts/pretrain.py configuration/recipes/pretrain.yaml
    python scripts/pretrain.py configuration/recipes/pretrain.yaml --texts news.txt books.jsonl --preset dsx-base
    python scripts/pretrain.py configuration/recipes/pretrain.yaml --resume_from_checkpoint true
    accelerate launch --config_file configuration/accelerate/multi_gpu.yaml scripts/pretrain.py <recipe and options>

The finished model, metrics.json and recipe.yaml go to output_dir, checkpoints to output_dir/checkpoints.
"""

from transformers import AutoModelForMaskedLM, set_seed

from modeling_dsx_encoder.building import limit_rows, load_model, load_tokenizer
from modeling_dsx_encoder.data import (
    MaskedLanguageModelingCollator,
    fixed_masks,
    hold_out_texts,
    tokenize_texts,
)
from modeling_dsx_encoder.recipe import DsxTrainingArguments, ModelArguments, PretrainArguments, parse_recipe, require
from modeling_dsx_encoder.training import build_trainer, evaluate_splits, prepare_run, save_finished


def main() -> None:
    """Parse, build, train, evaluate, save."""
    arguments = parse_recipe((ModelArguments, PretrainArguments, DsxTrainingArguments))
    model_arguments, text_arguments, training_arguments = arguments
    require(text_arguments, "texts")
    output = prepare_run(training_arguments)
    seed, share = training_arguments.seed, text_arguments.mask_probability
    set_seed(seed)

    texts = hold_out_texts(text_arguments.texts, **text_arguments.source_options())
    texts["train"] = limit_rows(texts["train"], text_arguments.max_train_samples, seed)
    tokenizer = load_tokenizer(model_arguments)
    model = load_model(model_arguments, AutoModelForMaskedLM, tokenizer)
    rows = {name: tokenize_texts(part, tokenizer, text_arguments.max_length) for name, part in texts.items()}
    rows["validation"] = fixed_masks(rows["validation"], tokenizer, mask_probability=share, seed=seed)

    trainer = build_trainer(
        model,
        training_arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        tokenizer=tokenizer,
        collator=MaskedLanguageModelingCollator(tokenizer, share, seed),
    )
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    metrics = evaluate_splits(trainer, {"validation": rows["validation"]})
    save_finished(trainer, output, metrics, arguments)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
