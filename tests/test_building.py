"""Model and tokenizer of a run fit each other, or the run does not begin."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny import tiny_config
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
)

from modeling_dsx_encoder import DsxEncoderForMaskedLM, DsxEncoderForSequenceClassification
from modeling_dsx_encoder.building import limit_rows, limit_splits, load_model, load_tokenizer
from modeling_dsx_encoder.recipe import DataArguments, ModelArguments

SMALL = ["hidden_size=32", "num_hidden_layers=1", "intermediate_size=48"]


@pytest.fixture
def tokenizer_folder(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def checkpoint(tmp_path, tiny_tokenizer):
    DsxEncoderForMaskedLM(tiny_config(vocab_size=len(tiny_tokenizer))).save_pretrained(tmp_path / "checkpoint")
    tiny_tokenizer.save_pretrained(tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint")


def test_preset_is_fitted_to_the_tokenizer(tokenizer_folder):
    arguments = ModelArguments(preset="dsx-tiny", tokenizer=tokenizer_folder, overrides=SMALL)
    tokenizer = load_tokenizer(arguments)
    tokenizer.model_max_length = int(1e30)
    model = load_model(arguments, AutoModelForSequenceClassification, tokenizer, num_labels=5)
    assert isinstance(model, DsxEncoderForSequenceClassification)
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_labels) == (len(tokenizer), 32, 5)
    assert (config.pad_token_id, config.cls_token_id) == (tokenizer.pad_token_id, tokenizer.cls_token_id)
    assert (config.sep_token_id, config.mask_token_id) == (tokenizer.sep_token_id, tokenizer.mask_token_id)
    assert tokenizer.model_max_length == config.max_position_embeddings


def test_checkpoint_brings_its_tokenizer_and_takes_a_new_head(checkpoint):
    arguments = ModelArguments(checkpoint=checkpoint, overrides=["hidden_dropout=0.3"], attn_implementation="eager")
    tokenizer = load_tokenizer(arguments)
    model = load_model(arguments, AutoModelForSequenceClassification, tokenizer, num_labels=7)
    assert model.classifier.weight.shape[0] == 7
    assert model.config.hidden_dropout == 0.3
    assert model.config._attn_implementation == "eager"
    model.config.problem_type = "regression"
    model.save_pretrained(checkpoint)
    again = load_model(arguments, AutoModelForSequenceClassification, tokenizer, num_labels=4)
    assert again.classifier.weight.shape[0] == 4
    assert again.config.problem_type is None


def test_frozen_layers_take_no_gradient_and_the_others_do(checkpoint, tiny_tokenizer):
    arguments = ModelArguments(checkpoint=checkpoint, num_frozen_layers=1)
    model = load_model(arguments, AutoModelForSequenceClassification, tiny_tokenizer, num_labels=2).train()
    model(torch.arange(5, 11).view(2, 3), labels=torch.tensor([0, 1])).loss.backward()
    learns = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {name for name, _ in model.named_parameters()} - learns
    assert {name.split(".")[1] for name in frozen} == {"embeddings", "layers"}
    assert all(name.startswith(("model.embeddings.", "model.layers.0.")) for name in frozen)
    assert {"model.layers.1.attention.qkv_proj.weight", "classifier.weight"} <= learns


def test_a_number_of_frozen_layers_that_cannot_be_is_refused(checkpoint, tmp_path, tiny_tokenizer):
    for number in (3, -1):
        arguments = ModelArguments(checkpoint=checkpoint, num_frozen_layers=number)
        with pytest.raises(ValueError, match=rf"num_frozen_layers={number} must lie between 0 and .* layers, 2"):
            load_model(arguments, AutoModelForSequenceClassification, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"num_frozen_layers=1 keeps layers .* there is no checkpoint"):
        ModelArguments(preset="dsx-tiny", num_frozen_layers=1)
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path / "bert")
    arguments = ModelArguments(checkpoint=str(tmp_path / "bert"), num_frozen_layers=1)
    with pytest.raises(ValueError, match=r"BertModel keeps its layers elsewhere: convert"):
        load_model(arguments, AutoModelForSequenceClassification, tiny_tokenizer)


def test_what_does_not_fit_is_refused(checkpoint, tmp_path, tiny_tokenizer):
    with pytest.raises(ValueError, match=r"`preset` is None"):
        load_tokenizer(ModelArguments())
    with pytest.raises(ValueError, match=r"`tokenizer` is None"):
        load_tokenizer(ModelArguments(preset="dsx-tiny"))
    with pytest.raises(ValueError, match=r"tokenizer='no/where' is no folder .* run the script that writes"):
        load_tokenizer(ModelArguments(preset="dsx-tiny", tokenizer="no/where"))
    with pytest.raises(ValueError, match=r"checkpoint='no/where' is no folder"):
        load_model(ModelArguments(checkpoint="no/where"), AutoModelForMaskedLM, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"unknown field 'hiden_dropout': did you mean 'hidden_dropout'"):
        load_model(
            ModelArguments(checkpoint=checkpoint, overrides=["hiden_dropout=0"]), AutoModelForMaskedLM, tiny_tokenizer
        )
    DsxEncoderForMaskedLM(tiny_config(vocab_size=7)).save_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match=rf"tokenizer has {len(tiny_tokenizer)} pieces, but .* vocab_size=7"):
        load_model(ModelArguments(checkpoint=str(tmp_path / "few")), AutoModelForMaskedLM, tiny_tokenizer)


def test_a_tokenizer_without_padding_is_refused(tmp_path, tiny_tokenizer):
    PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no pad_token"):
        load_tokenizer(ModelArguments(preset="dsx-tiny", tokenizer=str(tmp_path)))


def test_parts_of_data_sets():
    rows = Dataset.from_dict({"text": [str(number) for number in range(9)]})
    assert limit_rows(rows, None) is rows
    assert limit_rows(rows, 9) is rows
    assert len(limit_rows(rows, 4)) == 4
    assert limit_rows(rows, 4, 1)["text"][:] == limit_rows(rows, 4, 1)["text"][:] != limit_rows(rows, 4, 2)["text"][:]
    with pytest.raises(ValueError, match=r"0 rows are asked for"):
        limit_rows(rows, 0)
    splits = DatasetDict({"train": rows, "test": rows})
    limited = limit_splits(splits, DataArguments(max_train_samples=3, max_eval_samples=2))
    assert {name: len(part) for name, part in limited.items()} == {"train": 3, "test": 2}
