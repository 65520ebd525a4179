"""What the benchmark measures of tools that users run: the same call on a folder of this encoder and on one of BERT.

- `SentenceTransformer.encode`, which sorts the texts by length by itself
- `pipeline("text-classification")` with a batch size
- transformers' own `Trainer`, one epoch in random order

Nothing in a call names the encoder. Texts are made of words that the tokenizer knows one by one, so that their lengths
in tokens are those of the case.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from .benchmark_cases import VOCAB_SIZE, Case
from .benchmark_models import bert_config, dsx_config
from .modeling_dsx_encoder import DsxEncoderForSequenceClassification

SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token number n is the word `wn`, between [CLS] and [SEP]."""
    vocabulary = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(len(SPECIAL_TOKENS), VOCAB_SIZE))]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = [(token, numbers[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL_TOKENS)


def make_texts(batches: list[dict[str, torch.Tensor]]) -> list[str]:
    """The rows of the batches as texts of as many tokens, the special ones among them."""
    return [
        " ".join(f"w{number}" for number in row[mask.bool()].tolist()[2:])
        for batch in batches
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def save_folders(case: Case, dropout: float, position_embedding_type: str, target: Path) -> dict[str, Path]:
    """A classifier of each encoder with new weights and the tokenizer, as any checkpoint."""
    torch.manual_seed(0)
    built = {
        "dsx": DsxEncoderForSequenceClassification(dsx_config(case, dropout, position_embedding_type)),
        "bert": BertForSequenceClassification(bert_config(case, dropout)),
    }
    for name, model in built.items():
        model.save_pretrained(target / name)
        word_tokenizer().save_pretrained(target / name)
    return {name: target / name for name in built}


def encode_step(folder: Path, texts: list[str], batch_size: int) -> Callable:
    """Mean-pooled embeddings of all texts by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return lambda: model.encode(texts, batch_size=batch_size, show_progress_bar=False)


def pipeline_step(folder: Path, texts: list[str], batch_size: int) -> Callable:
    """Labels of all texts, in the order of the texts."""
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    return lambda: classify(texts, batch_size=batch_size)


def trainer_step(folder: Path, texts: list[str], batch_size: int) -> Callable:
    """One epoch of stock Trainer, optimizer and all, in random order."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = Dataset.from_dict({**tokenizer(texts), "labels": [number % 2 for number in range(len(texts))]})
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    trainer = Trainer(model, args, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer))

    def step():
        with contextlib.redirect_stdout(io.StringIO()):  # Trainer prints its summary
            return trainer.train()

    return step


TOOLS = {"sentence-transformers": encode_step, "pipeline": pipeline_step, "trainer": trainer_step}


def tool_steps(case: Case, texts: list[str], folders: dict[str, Path]) -> dict[str, list[Callable]]:
    """For each encoder the one call that the case measures."""
    return {name: [TOOLS[case.tool](folders[name], texts, case.texts.batch_size)] for name in case.competitors}
