"""Every file of configuration/ parses, builds, and says what its keys mean."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from modeling_dsx_encoder import DsxEncoderConfig, DsxEncoderModel
from modeling_dsx_encoder.presets import CONFIGURATION_FOLDER
from modeling_dsx_encoder.recipe import (
    DataArguments,
    DsxTrainingArguments,
    ModelArguments,
    PretrainArguments,
    TokenizerArguments,
    load_preset,
    parse_recipe,
)

MODELS = sorted((CONFIGURATION_FOLDER / "models").glob("*.json"))
RECIPES = sorted((CONFIGURATION_FOLDER / "recipes").glob("*.yaml"))
ACCELERATE = sorted((CONFIGURATION_FOLDER / "accelerate").glob("*.yaml"))
CLASSES = {
    "tokenizer": (TokenizerArguments,),
    "pretrain": (ModelArguments, PretrainArguments, DsxTrainingArguments),
    "classification": (ModelArguments, DataArguments, DsxTrainingArguments),
}
# Millions of parameters of the trunk without its word embeddings.
SIZES = {"dsx-tiny": (0.5, 2), "dsx-small": (5, 15), "dsx-base": (70, 100), "dsx-large": (250, 350)}


def by_stem(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", MODELS, ids=by_stem)
def test_preset_holds_only_what_differs_and_builds(path):
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values.pop("model_type") == "dsx_encoder"
    defaults = {field.name: field.default for field in dataclasses.fields(DsxEncoderConfig)}
    assert not [name for name, value in values.items() if defaults[name] == value]
    config = load_preset(path)
    assert DsxEncoderConfig.from_json_file(path).to_dict() == config.to_dict()
    with torch.device("meta"):
        model = DsxEncoderModel(config)
    embeddings = model.get_input_embeddings().weight.numel()
    size = (sum(p.numel() for p in model.parameters()) - embeddings) / 1e6
    low, high = SIZES.get(path.stem, (0, 1000))
    assert low < size < high


def test_the_original_transformer():
    config = load_preset("transformer-2017")
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (512, 8, 2048)
    assert (config.num_hidden_layers, config.norm_position, config.hidden_act) == (6, "post", "relu")
    assert (config.gated_mlp, config.mlp_bias, config.attention_bias) == (False, True, True)
    assert (config.position_embedding_type, config.scale_embeddings) == ("sinusoidal", True)


@pytest.mark.parametrize("path", RECIPES, ids=by_stem)
def test_recipe_parses_and_comments_every_key(path):
    parse_recipe(CLASSES[path.stem], [str(path)])
    lines = path.read_text(encoding="utf-8").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\w+:", line):
            assert "#" in line or before.startswith("#"), f"{path.name}: {line!r} has no comment"


def test_every_recipe_is_tried():
    assert {path.stem for path in RECIPES} == set(CLASSES)


@pytest.mark.parametrize("path", ACCELERATE, ids=by_stem)
def test_accelerate_file_loads_and_holds_topology_only(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    topology = {"compute_environment", "distributed_type", "num_machines", "num_processes", "machine_rank", "use_cpu"}
    assert set(text) <= topology | {"gpu_ids", "fsdp_config"}
    assert path.read_text(encoding="utf-8").startswith("#")


def test_accelerate_files_are_all_there():
    assert {"cpu", "cpu_two_processes", "single_gpu", "multi_gpu", "fsdp"} <= {path.stem for path in ACCELERATE}
