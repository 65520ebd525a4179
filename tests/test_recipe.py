"""Recipes and presets: what wins, what is refused and how it is said."""

import json
from dataclasses import dataclass, field

import pytest
import torch
import yaml

from modeling_dsx_encoder import DsxEncoderConfig
from modeling_dsx_encoder.presets import preset_path
from modeling_dsx_encoder.recipe import (
    DataArguments,
    DsxTrainingArguments,
    ModelArguments,
    PretrainArguments,
    TokenizerArguments,
    load_preset,
    parse_recipe,
    require,
    save_recipe,
)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_recipe_gives_values_and_the_command_line_wins(tmp_path):
    recipe = write(tmp_path / "r.yaml", "learning_rate: 5e-4\nseed: 7\ndata: 评论.csv\noutput_dir: runs/a\n")
    data, training = parse_recipe((DataArguments, DsxTrainingArguments), [recipe, "--seed", "8", "--data=b.csv"])
    assert training.learning_rate == 5e-4  # YAML reads 5e-4 as text
    assert (training.seed, data.data, training.output_dir) == (8, "b.csv", "runs/a")


def test_command_line_alone_is_enough():
    (arguments,) = parse_recipe((TokenizerArguments,), ["--train_files", "a.txt", "b.txt", "--no_split_cjk"])
    assert arguments.train_files == ["a.txt", "b.txt"]
    assert not arguments.split_cjk


def test_lists_and_nulls_of_a_recipe_arrive(tmp_path):
    recipe = write(tmp_path / "r.yaml", "overrides: [hidden_dropout=0.0, num_layers=2]\npreset: null\n")
    (model,) = parse_recipe((ModelArguments,), [recipe])
    assert model.preset is None
    assert model.parsed_overrides() == {"hidden_dropout": 0.0, "num_layers": 2}


def test_a_required_field_may_come_from_the_recipe(tmp_path):
    @dataclass
    class Needs:
        source: str = field(metadata={"help": "needed"})

    (arguments,) = parse_recipe((Needs,), [write(tmp_path / "r.yaml", "source: a\n")])
    assert arguments.source == "a"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("learning_rat: 1.0\n", r"unknown key 'learning_rat': did you mean 'learning_rate'"),
        ("zzzz: 1.0\n", r"unknown key 'zzzz': known names: .*adam_beta1"),
        ("eval_strategy: no\n", r'eval_strategy is False, .* quote it, as in eval_strategy: "no"'),
        ("- a\n- b\n", r"holds a list, but it must be lines of `key: value`"),
    ],
)
def test_faulty_recipes_are_refused(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        parse_recipe((DsxTrainingArguments,), [write(tmp_path / "r.yaml", text)])


def test_missing_recipe_file_is_refused():
    with pytest.raises(ValueError, match=r"recipe 'nowhere.yaml' is not a file"):
        parse_recipe((ModelArguments,), ["nowhere.yaml"])


@dataclass
class Outputs:
    output_dir: str | None = None
    scores_file: str | None = None


@pytest.mark.parametrize(
    ("option", "message"), [("output_dir", "is a file, but a folder"), ("scores_file", "is a fol")]
)
def test_outputs_of_the_wrong_kind_are_refused_before_any_work(option, message, tmp_path):
    path = tmp_path / "there"
    path.touch() if option == "output_dir" else path.mkdir()
    with pytest.raises(ValueError, match=rf"{option}=.*there' {message}"):
        parse_recipe((Outputs,), [f"--{option}", str(path)])
    parse_recipe((Outputs,), [f"--{option}", str(tmp_path / "new")])


@pytest.mark.parametrize("option", ["--learning-rat", "--learning_rat=3"])
def test_unknown_option_is_refused(option):
    with pytest.raises(ValueError, match=r"unknown argument .* did you mean 'learning_rate'"):
        parse_recipe((DsxTrainingArguments,), [option, "3"])


def test_require_names_the_field():
    with pytest.raises(ValueError, match=r"`data` is None, .* on the command line"):
        require(DataArguments(), "task" if DataArguments().task else "data")


def test_checkpoint_and_preset_exclude_each_other():
    with pytest.raises(ValueError, match=r"checkpoint='a' and preset='b' are both given"):
        ModelArguments(checkpoint="a", preset="b")


@pytest.mark.parametrize("text", ["hidden_dropout", "=3"])
def test_overrides_are_name_and_value(text):
    with pytest.raises(ValueError, match=r"overrides holds .* name=value"):
        ModelArguments(overrides=[text]).parsed_overrides()


@pytest.mark.parametrize("name", ["mask_probability", "validation_fraction"])
def test_shares_lie_between_0_and_1(name):
    with pytest.raises(ValueError, match=rf"{name}=30.0 lies outside"):
        PretrainArguments(**{name: 30.0})


def test_tokens_column_only_for_tags():
    assert DataArguments().source_options()["tokens_column"] is None
    assert DataArguments().source_options("token")["tokens_column"] == "tokens"
    assert DataArguments(task="token", tokens_column="words").source_options()["tokens_column"] == "words"


def test_saved_recipe_runs_again_and_keeps_no_secret(tmp_path):
    classes = (ModelArguments, DataArguments, DsxTrainingArguments)
    options = ["--data", "评论.csv", "--output_dir", str(tmp_path / "o"), "--lr_scheduler_type", "cosine"]
    options += ["--eval_strategy", "epoch", "--warmup_steps", "0.1", "--hub_token", "hf_secret", "--report_to", "none"]
    first = parse_recipe(classes, options)
    path = save_recipe(first, tmp_path, output_dir=str(tmp_path / "o"))
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text
    assert "评论" in text
    again = parse_recipe(classes, [str(path)])
    assert again[:2] == first[:2]
    for name in ("lr_scheduler_type", "eval_strategy", "warmup_steps", "output_dir", "seed", "report_to"):
        assert getattr(again[2], name) == getattr(first[2], name), name
    assert yaml.safe_load(text)["lr_scheduler_type"] == "cosine"


def test_presets_are_found_by_name_path_and_folder(tmp_path):
    tiny = load_preset("dsx-tiny")
    assert isinstance(tiny, DsxEncoderConfig)
    assert load_preset(preset_path("dsx-tiny")).to_dict() == tiny.to_dict()
    tiny.save_pretrained(tmp_path)
    assert load_preset(tmp_path).hidden_size == tiny.hidden_size


def test_overrides_of_a_preset_win_and_take_the_names_of_the_literature():
    config = load_preset("dsx-tiny", d_model=64, vocab_size=99, num_labels=5)
    assert (config.hidden_size, config.vocab_size, config.num_labels) == (64, 99, 5)


def test_unknown_presets_and_keys_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"preset 'dsx-tinny' .* did you mean 'dsx-tiny'"):
        load_preset("dsx-tinny")
    with pytest.raises(ValueError, match=r"unknown key 'hiden_size': did you mean 'hidden_size'"):
        load_preset("dsx-tiny", hiden_size=3)
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"model_type": "dsx_encoder", "hidden_sise": 64}))
    with pytest.raises(ValueError, match=r"odd.json .* unknown key 'hidden_sise'"):
        load_preset(path)
    path.write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"model_type 'bert', but a preset of this package has 'dsx_encoder'"):
        load_preset(path)


def test_bf16_needs_no_second_word_on_a_cpu(tmp_path):
    arguments = DsxTrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert arguments.bf16
    assert arguments.use_cpu == (not torch.accelerator.is_available())
    assert not DsxTrainingArguments(output_dir=str(tmp_path)).use_cpu
